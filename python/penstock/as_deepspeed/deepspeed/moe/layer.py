"""The MoE layer, which is not supported yet."""

import torch

from .. import _missing_name

MoE = _missing_name.cls(
    "deepspeed.moe.layer.MoE",
    "expert parallelism is not built yet; a model's own experts train under every strategy",
    (torch.nn.Module,),
)
