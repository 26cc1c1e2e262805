"""Reads rank and world size from torch.distributed's process group, without importing torch."""

import contextlib
import sys
from typing import Any

from penstock._native import _penstock


def _distributed() -> Any:
    """Returns torch.distributed if it is imported and has a process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def is_initialized() -> bool:
    """Whether torch.distributed has a process group."""
    return _distributed() is not None


def rank() -> int:
    """Returns this process's rank, 0 without a process group."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def world() -> int:
    """Returns the number of ranks, 1 without a process group."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())


def timeout_s() -> float | None:
    """Returns the longest timeout of the process group's back ends, in seconds; 0 without a process
    group, None if no back end has options that give it (MPI, groups written in Python)."""
    dist = _distributed()
    if dist is None:
        return 0.0
    group, found = dist.group.WORLD, []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # torch's answer for a back end without options
            found.append(float(_penstock.back_end_timeout_s(group._get_backend(device))))
    return max(found, default=None)
