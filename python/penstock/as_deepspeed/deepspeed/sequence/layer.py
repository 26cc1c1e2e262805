"""DeepSpeed's attention over a group of ranks: Penstock's is mesh.sequence."""

import torch

from .. import _absent

DistributedAttention = _absent.cls(
    "deepspeed.sequence.layer.DistributedAttention",
    _absent.SEQUENCE,
    (torch.nn.Module,),
)
