"""Connects the ranks of a run, from torch.distributed or the environment of the launcher."""

import contextlib
import datetime
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import device_backends, environment, process_group
from penstock.front.process_group import rank as rank
from penstock.front.process_group import world as world

_LONGEST_S = 1e9  # the largest allowed value of comm.timeout_s


class _Meetings:
    """The meetings of groups that share memory. The number of a meeting is part of its keys in the
    store. All ranks make the same groups, so these numbers match."""

    number = 0  # of the next meeting

    @classmethod
    def begin(cls) -> PrefixStore:
        prefix = f"penstock/ranks/{cls.number}"
        cls.number += 1
        return PrefixStore(prefix, distributed_c10d._get_default_store())


class _Made:
    """The process groups of one engine. `close()` or the deletion of this object destroys them,
    without waiting for other ranks."""

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
    """An engine's own group over all ranks.

    It uses shared memory if all ranks are on one host; otherwise it uses two gloo process groups,
    one per direction. A single rank needs neither. `close()` frees the groups; so does the deletion
    of this object and the group.

    Args:
        timeout_s: seconds until a wait for a peer fails.
        warn_s: seconds until a wait for a peer prints a line on stderr; 0: never.
        report_dir: folder for reports of failures, or "".
        back_end: name of the back end with collectives on the model's device, or None.
        transport: the value of the key comm.backend.
        has_stages: whether the ranks form pipelines.

    Raises:
        ConfigError: on all ranks, if `transport` is "shm" and ranks are on several hosts.
    """

    def __init__(
        self,
        timeout_s: float,
        warn_s: float = 30.0,
        report_dir: str = "",
        back_end: str | None = None,
        transport: str = "auto",
        has_stages: bool = False,
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
            made_by = device_backends.DeviceGroups(back_end, timeout, has_stages)
            self.group.set_device_groups(made_by)

    def close(self) -> None:
        """Destroys the process groups, without waiting for other ranks."""
        self._made.close()


_REFUSED = "[front::initialize] rank"


def meetings() -> int:
    """Returns the number of meetings that this rank has begun."""
    return _Meetings.number


def refuse(error: BaseException) -> None:
    """Tells ranks that wait in the next meeting why this rank will not arrive."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A text that begins like this stands for a rank that is gone ([Note: Meeting]).
    text = (
        f"!{_REFUSED} {dist.get_rank()}, for which this rank waited, raised "
        f"{type(error).__name__}. Fix the error there: {error}"
    )
    with contextlib.suppress(RuntimeError):  # the store's host has ended
        _Meetings.begin().set(f"meeting 0/who/{dist.get_rank()}", text)


def with_timeout(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of a config with `comm.timeout_s`, which is `default_timeout_s()` if
    `values` does not set it."""
    comm = values.get("comm")
    if comm is not None and not isinstance(comm, Mapping):
        return values  # reading the config refuses it
    if comm and comm.get("timeout_s") is not None:
        return values
    return {**values, "comm": {**(comm or {}), "timeout_s": default_timeout_s()}}


def default_timeout_s() -> float:
    """Returns how long an engine waits for a peer if no setting decides: the default of
    `comm.timeout_s` or the timeout of torch's default process group, whichever is longer.

    Warns on rank 0 if several ranks have a process group that does not report its timeout.
    """
    own = float(_penstock.Config({}).comm.timeout_s)
    of_group = process_group.timeout_s()
    if of_group is None and world() > 1 and rank() == 0:
        warnings.warn(
            f'[front::initialize] the process group of torch ("{dist.get_backend()}") does not '
            f"report its timeout, so the engine waits {own:g} s for a peer. If a rank may take "
            'longer, set "comm.timeout_s"',
            stacklevel=4,
        )
    return min(max(own, of_group or 0.0), _LONGEST_S)


def of_config(config: Any, device: torch.device) -> Ranks:
    """Makes the group that a config describes, for a model on `device`."""
    comm = config.comm
    back_end = device_backends.name_for(device, comm.backend)
    return Ranks(
        comm.timeout_s,
        comm.warn_s,
        comm.report_dir,
        back_end,
        comm.backend,
        config.mesh.pipeline > 1,
    )


def _on_one_host(wanted: str, timeout_s: float, warn_s: float, report_dir: str) -> Any:
    """Returns a group through shared memory. Returns None on all ranks if it is not possible."""
    store = _Meetings.begin()
    try:
        group, why_not = _penstock.Group.on_one_host(
            store, (dist.get_rank(), dist.get_world_size()), timeout_s, warn_s, report_dir
        )
    except RuntimeError as error:
        raise RuntimeFault(str(error)) if _REFUSED in str(error) else error from None
    if group is None and why_not:
        warnings.warn(
            f"the ranks of this host cannot share memory, so they exchange over gloo: {why_not}",
            stacklevel=5,
        )
    elif group is None and wanted == "shm":
        raise ConfigError(
            '[front::initialize] "comm.backend" is "shm", but the ranks are on several hosts. '
            'Use "auto" or "gloo"'
        )
    return group
