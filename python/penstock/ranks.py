"""The ranks that train together, from torch.distributed or the launcher's environment."""

import datetime
import os

import torch.distributed as dist

from penstock._native import _penstock


class Ranks:
    """Gloo process groups of our own over all ranks, one a direction; none for a single rank."""

    def __init__(self, timeout_s: float, warn_s: float = 30.0, report_dir: str = "") -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo", timeout=timeout)
        self._process_groups: list[dist.ProcessGroup] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.group = _penstock.Group.alone()
            return
        made = self._process_groups  # not self, which owns the group that keeps this function

        def connect() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            up, down = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
            made.extend((up, down))
            return up, down

        up, down = connect()
        self.group = _penstock.Group.from_process_group(
            up, timeout_s, down, connect, warn_s, report_dir
        )

    def close(self) -> None:
        """Lets go of the process groups; no rank needs to be there."""
        for group in self._process_groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._process_groups.clear()


def rank() -> int:
    """This process's rank; 0 when there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0
