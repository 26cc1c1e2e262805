"""The ranks that train together, from torch.distributed or the launcher's environment."""

import datetime
import itertools
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from penstock._native import ConfigError, _penstock
from penstock.front import device_backends, environment
from penstock.front.process_group import rank as rank
from penstock.front.process_group import world as world

# Of the groups of this process: all ranks make the same ones, so they meet in the store.
_numbers = itertools.count()


class _Made:
    """Process groups of one engine, which torch keeps until they are destroyed: by `close()`, or
    when nobody has this any more. No rank needs to be there."""

    def __init__(self) -> None:
        groups: list[dist.ProcessGroup] = []
        self.groups = groups
        self.close = weakref.finalize(self, _destroy, groups)
        self.close.atexit = False


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        if dist.is_initialized():
            dist.destroy_process_group(group)


class Ranks:
    """A group of our own over all ranks: through shared memory where they are on one host, else
    over gloo process groups, one a direction. None of them for a single rank.

    They are let go of by `close()`, or when neither this nor the group is used any more.
    `back_end`: what has collectives on the memory of the device that the model is on, or none.
    `transport`: the key comm.backend. Raises ConfigError on all ranks for a "shm" that cannot be.
    """

    def __init__(
        self,
        timeout_s: float,
        warn_s: float = 30.0,
        report_dir: str = "",
        back_end: str | None = None,
        transport: str = "auto",
    ) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            environment.adopt()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo", timeout=timeout)
        made = self._made = _Made()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.group = _penstock.Group.alone()
            return
        if transport == "shm" or (transport == "auto" and back_end is None):
            self.group = _on_one_host(transport, timeout_s, warn_s, report_dir)
            if self.group is not None:
                return

        def connect() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            for _ in range(2):
                made.groups.append(dist.new_group(backend="gloo", timeout=timeout))
            return made.groups[-2], made.groups[-1]

        up, down = connect()
        self.group = _penstock.Group.from_process_group(
            up, timeout_s, down, connect, warn_s, report_dir
        )
        if back_end is not None:
            self.group.set_device_groups(device_backends.DeviceGroups(back_end, timeout))

    def close(self) -> None:
        """Lets go of the process groups; no rank needs to be there."""
        self._made.close()


def of_config(comm: Any, device: torch.device) -> Ranks:
    """By the section "comm" of a config, for a model on that device."""
    back_end = device_backends.name_for(device, comm.backend)
    return Ranks(comm.timeout_s, comm.warn_s, comm.report_dir, back_end, comm.backend)


def _on_one_host(wanted: str, timeout_s: float, warn_s: float, report_dir: str) -> Any:
    """A group through shared memory, or None on all ranks alike."""
    prefix = f"penstock/ranks/{next(_numbers)}"
    store = PrefixStore(prefix, distributed_c10d._get_default_store())
    group, why_not = _penstock.Group.on_one_host(
        store, (dist.get_rank(), dist.get_world_size()), timeout_s, warn_s, report_dir
    )
    if group is None and why_not:
        warnings.warn(
            f"the ranks of this host cannot share memory and exchange over gloo: {why_not}",
            stacklevel=5,
        )
    elif group is None and wanted == "shm":
        raise ConfigError(
            '[front::initialize] "comm.backend" is "shm", and the ranks are on several hosts: '
            '"auto" and "gloo" connect them'
        )
    return group
