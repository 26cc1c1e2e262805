"""Experts."""

import torch

from .. import _missing_name

MoE = _missing_name.cls(
    "deepspeed.moe.layer.MoE",
    "expert parallelism is not built yet; experts of a model's own train under every strategy",
    (torch.nn.Module,),
)
