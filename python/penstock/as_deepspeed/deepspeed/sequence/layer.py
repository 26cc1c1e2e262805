"""Attention over a group of ranks, which is not built yet."""

import torch

from .. import _absent

DistributedAttention = _absent.cls(
    "deepspeed.sequence.layer.DistributedAttention",
    "sequence parallelism is not built yet",
    (torch.nn.Module,),
)
