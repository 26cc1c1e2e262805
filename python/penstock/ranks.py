"""The ranks that train together, from torch.distributed or the launcher's environment."""

import datetime
import os
import weakref

import torch.distributed as dist

from penstock import device_back_ends, environment
from penstock._native import _penstock


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
    """Gloo process groups of our own over all ranks, one a direction; none for a single rank.

    They are let go of by `close()`, or when neither this nor the group is used any more.
    `back_end`: what has collectives on the memory of the device that the model is on, or none.
    """

    def __init__(
        self,
        timeout_s: float,
        warn_s: float = 30.0,
        report_dir: str = "",
        back_end: str | None = None,
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

        def connect() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            for _ in range(2):
                made.groups.append(dist.new_group(backend="gloo", timeout=timeout))
            return made.groups[-2], made.groups[-1]

        up, down = connect()
        self.group = _penstock.Group.from_process_group(
            up, timeout_s, down, connect, warn_s, report_dir
        )
        if back_end is not None:
            self.group.set_device_groups(device_back_ends.DeviceGroups(back_end, timeout))

    def close(self) -> None:
        """Lets go of the process groups; no rank needs to be there."""
        self._made.close()


def rank() -> int:
    """This process's rank; 0 when there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Number of ranks; 1 when there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1
