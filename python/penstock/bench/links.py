"""Measures how many bytes per second a rank sends to other ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from penstock.bench.setting import Setting
from penstock.front import device_backends, registration

_BYTES = 8 << 20
# Named *_single since torch 2.13.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _exchanges(setting: Setting, group: Any, seconds: float) -> list[float]:
    """Measures the bytes/s that this rank sends in alternating all-gathers and reduce-scatters."""
    size = dist.get_world_size(group)
    numel = _BYTES // setting.dtype.itemsize // size
    whole = torch.zeros(numel * size, dtype=setting.dtype, device=setting.device)
    part = torch.ones(numel, dtype=setting.dtype, device=setting.device)
    sent = 2.0 * (size - 1) * part.nbytes

    def run() -> float:
        setting.wait()
        begin = time.perf_counter()
        _GATHER(whole, part, group=group)
        _REDUCE(part, whole, group=group)
        setting.wait()
        return sent / (time.perf_counter() - begin)

    return setting.ranks.samples(run, seconds)


def links(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures "local", inside a node, and "node", across the ranks with equal local rank.

    A field is left out if one of its groups has a single rank. The back end is chosen as by
    comm.backend "auto".
    """
    ranks = setting.ranks
    if ranks.world == 1:
        return {}
    first = ranks.rank - ranks.local_rank  # first rank of this node
    nodes: dict[int, list[int]] = {}
    columns: dict[int, list[int]] = {}
    for rank, place in enumerate(ranks.all_of((first, ranks.local_rank))):
        nodes.setdefault(place[0], []).append(rank)
        columns.setdefault(place[1], []).append(rank)
    back_end = device_backends.name_for(setting.device, "auto") or (
        registration.NAME if len(nodes) == 1 else "gloo"
    )
    found: dict[str, list[float]] = {}
    for field, members, own in (
        ("local", nodes, first),
        ("node", columns, ranks.local_rank),
    ):
        if any(len(one) == 1 for one in members.values()):
            continue  # at least one rank would have no peer
        groups = {key: dist.new_group(one, backend=back_end) for key, one in members.items()}
        found[field] = _exchanges(setting, groups[own], seconds / 2)
        dist.destroy_process_group(groups[own])
    return found
