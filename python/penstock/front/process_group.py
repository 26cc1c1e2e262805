"""This process's place in torch.distributed's process group, without importing torch."""

import sys
from typing import Any


def _distributed() -> Any:
    """torch.distributed if it has a process group, else None: a group needs torch imported."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def is_initialized() -> bool:
    """Whether there is a process group."""
    return _distributed() is not None


def rank() -> int:
    """This process's rank; 0 when there is no process group."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def world() -> int:
    """Number of ranks; 1 when there is no process group."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())
