"""torch.distributed with DeepSpeed's names."""

from . import comm as _comm
from .comm import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_comm, name)
