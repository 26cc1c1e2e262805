"""The back end "penstock" of torch.distributed: ranks of one host, through memory that they share.

    dist.init_process_group("penstock")     # or new_group(backend="penstock")

Imported with penstock. For torch's own DDP, FSDP2 and collectives of CPU tensors; an engine needs
no such group.
"""

import datetime
import warnings
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock._native import _penstock

NAME = "penstock"


def _make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """The back end, or on all ranks gloo with a warning that says why."""
    own = PrefixStore("penstock", store)
    made, why_not = _penstock.one_host_back_end(own, rank, size, timeout.total_seconds())
    if made is not None:
        return made
    warnings.warn(
        f'the back end "{NAME}" is gloo here, as these ranks cannot share memory: {why_not}',
        stacklevel=2,
    )
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def register() -> None:
    """Makes the name known to torch.distributed; again is nothing."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])


register()
