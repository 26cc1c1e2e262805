"""The ranks that train together, from torch.distributed or the launcher's environment."""

import datetime
import os

import torch.distributed as dist

from penstock._native import _penstock


class Ranks:
    """A gloo process group of our own over all ranks; nothing for a single one."""

    def __init__(self, timeout_s: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo", timeout=timeout)
        self._process_group: dist.ProcessGroup | None = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.group = _penstock.Group.alone()
            return
        self._process_group = dist.new_group(backend="gloo", timeout=timeout)
        self.group = _penstock.Group.from_process_group(self._process_group, timeout_s)

    def close(self) -> None:
        """Lets go of the process group; no rank needs to be there."""
        if self._process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._process_group)
        self._process_group = None


def rank() -> int:
    """This process's rank; 0 when there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0
