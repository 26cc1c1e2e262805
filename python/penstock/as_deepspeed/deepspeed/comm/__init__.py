"""torch.distributed with DeepSpeed's names."""

from .. import _table
from . import comm as _comm
from .comm import *  # noqa: F403

__getattr__ = _table.attributes(__name__, _comm)
