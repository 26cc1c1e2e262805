"""The back end "penstock" of torch.distributed: ranks of one host exchange through shared memory.

    dist.init_process_group("penstock")     # or new_group(backend="penstock")

It is for torch's own DDP, FSDP2 and collectives of CPU tensors. An engine does not need it.
`penstock.front.registration` registers the name with torch.
"""

import datetime
import warnings
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock._native import _penstock
from penstock.front.registration import NAME


def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Returns the back end. If ranks cannot share memory, returns gloo on all ranks and warns."""
    own = PrefixStore("penstock", store)
    made, why_not = _penstock.one_host_back_end(own, rank, size, timeout.total_seconds())
    if made is not None:
        return made
    warnings.warn(
        f'the back end "{NAME}" uses gloo, because these ranks cannot share memory: {why_not}',
        stacklevel=3,
    )
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
