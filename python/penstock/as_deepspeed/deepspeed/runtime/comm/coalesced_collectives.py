"""Collectives of several tensors at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


@torch.no_grad()
def reduce_scatter_coalesced(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Averages the tensors over the ranks of the group, in one collective.

    The tensors keep their values. They must have one dtype and one device.

    Returns:
        For each tensor, this rank's part as a vector of ceil(numel / ranks) elements. If the number
        of ranks does not divide numel, the last ranks have fewer elements or none.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-one.numel() // world) for one in tensors]
    together = tensors[0].new_zeros(world, sum(sizes))
    for one, own in zip(tensors, torch.split(together, sizes, dim=1), strict=True):
        pieces = torch.split(one.reshape(-1), max(own.shape[1], 1))
        for part, given in zip(own, pieces, strict=False):
            torch.div(given, world, out=part[: given.numel()])
    made = torch.empty_like(together[rank])
    dist.reduce_scatter_tensor(made, together.view(-1), group=group)
    parts = []
    for one, size, part in zip(tensors, sizes, torch.split(made, sizes), strict=True):
        parts.append(part[: max(0, min(size, one.numel() - rank * size))])
    return parts
