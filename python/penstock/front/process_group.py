"""Reads rank and world size from torch.distributed's process group, without importing torch."""

import sys
from typing import Any


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
