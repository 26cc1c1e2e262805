"""Connects the ranks of a run, from torch.distributed or the environment of the launcher."""

import collections
import contextlib
import datetime
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

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
        self.made_by = os.getpid()
        self.close = weakref.finalize(self, _destroy, groups, self.made_by)
        self.close.atexit = False


_of_parent: list[list[dist.ProcessGroup]] = []  # copies, kept in a forked process


def _destroy(groups: list[dist.ProcessGroup], made_by: int) -> None:
    if os.getpid() != made_by:  # to destroy a copy would wait for threads of the parent
        _of_parent.append(groups)
        return
    while groups:
        group = groups.pop()
        if dist.is_initialized():
            dist.destroy_process_group(group)


_made_of: collections.Counter[str] = collections.Counter()  # number of groups of these ranks


def _of_some(members: list[int], timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Makes a gloo group of these ranks, which all call this. torch does not know the group: it
    would name the group by its ranks, and could find keys of a destroyed group in the store."""
    ranks = "-".join(map(str, members))
    store = PrefixStore(
        f"penstock/gloo/{ranks}/{_made_of[ranks]}", distributed_c10d._get_default_store()
    )
    _made_of[ranks] += 1
    own, size = members.index(dist.get_rank()), len(members)
    group = dist.ProcessGroup(store, own, size)
    gloo = dist.ProcessGroupGloo(store, own, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


class Waits(NamedTuple):
    """How a group waits for peers."""

    timeout_s: float  # seconds until a wait fails
    warn_s: float = 30.0  # seconds until a wait prints a line on stderr; 0: never
    report_dir: str = ""  # folder for reports of failures, or ""


class Ranks:
    """An engine's own group over all ranks.

    It uses shared memory if all ranks are on one host; otherwise it uses two gloo process groups,
    one per direction. A single rank needs neither. `close()` frees the groups; so does the deletion
    of this object and the group.

    With `nodes`, the group has the ranks of this rank's node.

    Attributes:
        group: the group.
        nodes: with `nodes`, the group of the ranks at the same position in all nodes; else None.

    Args:
        waits: how long the ranks wait for each other.
        back_end: name of the back end with collectives on the model's device, or None.
        transport: the value of the key comm.backend.
        has_stages: whether the ranks form pipelines.
        nodes: the ranks of this rank's node, and those at its position in all nodes, in ascending
            order; or None.

    Raises:
        ConfigError: on all ranks, if `transport` is "shm" and ranks are on several hosts.
    """

    def __init__(
        self,
        waits: Waits,
        back_end: str | None = None,
        transport: str = "auto",
        has_stages: bool = False,
        nodes: Callable[[], tuple[list[int], list[int]]] | None = None,
    ) -> None:
        timeout = datetime.timedelta(seconds=waits.timeout_s)
        if not dist.is_initialized():
            environment.adopt()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo", timeout=timeout)
        self._made = _Made()
        self._waits = waits
        self.nodes: Any = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.group = _penstock.Group.alone()
            if nodes is not None:
                self.nodes = _penstock.Group.alone()
            return
        members = list(range(dist.get_world_size()))
        across: list[int] = []
        if nodes is not None:
            members, across = nodes()
        try:
            self.group = self._connect(members, transport, back_end)
        except Exception as error:
            if across and transport != "gloo":  # groups of gloo do not meet
                _tell(across, error)
            raise
        if back_end is not None and len(members) > 1:
            made_by = device_backends.DeviceGroups(back_end, timeout, has_stages, members)
            self.group.set_device_groups(made_by)
        if across:
            # Nodes meet in host memory.
            self.nodes = self._connect(across, "gloo" if transport == "gloo" else "auto", None)

    def _connect(self, members: list[int], transport: str, back_end: str | None) -> Any:
        """Connects these ranks, which all call this in the same order."""
        waits = self._waits
        if len(members) == 1:
            return _penstock.Group.alone()
        if transport == "shm" or (transport == "auto" and back_end is None):
            group = _on_one_host(members, transport, waits)
            if group is not None:
                return group
        timeout = datetime.timedelta(seconds=waits.timeout_s)
        made = self._made

        def connect() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            if len(members) < dist.get_world_size():
                return _of_some(members, timeout), _of_some(members, timeout)
            for _ in range(2):
                made.groups.append(dist.new_group(backend="gloo", timeout=timeout))
            return made.groups[-2], made.groups[-1]

        try:
            up, down = connect()
        except RuntimeError as error:
            own = dist.get_rank()
            others = ", ".join(str(one) for one in members if one != own)
            raise RuntimeFault(
                f"[front::initialize] rank {own} did not connect over gloo to rank {others}: "
                f"{error}"
            ) from None
        return _penstock.Group.from_process_group(
            up, waits.timeout_s, down, connect, waits.warn_s, waits.report_dir
        )

    def core(self, tree: Any, config: Any, external_optimizer: bool) -> Any:
        """Makes the core of an engine over these ranks."""
        return _penstock.Core(tree, config, self.group, external_optimizer, self.nodes)

    @property
    def copied(self) -> bool:
        """Whether this process was forked from the one that made this object, which it must leave
        alone ([Note: Forked processes], python/src/kept.h)."""
        return os.getpid() != self._made.made_by

    def on_first_node(self) -> bool:
        """Whether this rank is on the node that writes files. True if there are no nodes."""
        return self.nodes is None or bool(self.nodes.rank == 0)

    def close(self) -> None:
        """Destroys the process groups, without waiting for other ranks."""
        self._made.close()


_REFUSED = "[front::initialize] rank"


def meetings() -> int:
    """Returns the number of meetings that this rank has begun."""
    return _Meetings.number


def refuse(error: BaseException, mesh: Mapping[str, Any] | None = None) -> None:
    """Tells ranks that wait in the next meetings why this rank will not arrive.

    Args:
        error: the reason.
        mesh: the values of the key mesh, if nodes train on their own and meet on their own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    meetings_of = [list(range(dist.get_world_size()))]
    if mesh is not None:
        ones = {"node": 1, "pipeline": 1, "tensor": 1, "sequence": 1}
        with contextlib.suppress(ConfigError, TypeError, ZeroDivisionError):
            meetings_of = list(_nodes(SimpleNamespace(**{**ones, **mesh})))
    for members in meetings_of:
        _tell(members, error)


def _tell(members: list[int], error: BaseException) -> None:
    """Tells these ranks, which wait in the next meeting."""
    if len(members) == 1:
        return
    store, own = _Meetings.begin(), members.index(dist.get_rank())
    if len(members) < dist.get_world_size():
        store = PrefixStore("-".join(map(str, members)), store)
    # A text that begins like this stands for a rank that is gone ([Note: Meeting]).
    text = (
        f"!{_REFUSED} {dist.get_rank()}, for which this rank waited, raised "
        f"{type(error).__name__}. Fix the error there: {error}"
    )
    with contextlib.suppress(RuntimeError):  # the store's host has ended
        store.set(f"meeting 0/who/{own}", text)


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
        Waits(comm.timeout_s, comm.warn_s, comm.report_dir),
        back_end,
        comm.backend,
        config.mesh.pipeline > 1,
        functools.partial(_nodes, config.mesh) if comm.codec == "local" else None,
    )


def _nodes(mesh: Any) -> tuple[list[int], list[int]]:
    """Returns the ranks of this rank's node, and the ranks at its position in all nodes. A node has
    neighbouring ranks of each pipeline stage."""
    world, own = dist.get_world_size(), dist.get_rank()
    per_stage, rest = divmod(world, mesh.pipeline * mesh.node)
    model = mesh.tensor * mesh.sequence
    if rest or per_stage % model:
        raise ConfigError(
            f'[front::initialize] {world} ranks cannot form "mesh.node" {mesh.node} nodes of whole '
            f"models: with mesh.pipeline {mesh.pipeline}, mesh.tensor {mesh.tensor} and "
            f"mesh.sequence {mesh.sequence}, start a multiple of "
            f"{mesh.pipeline * mesh.node * model} ranks"
        )
    node, position = own // per_stage % mesh.node, own % per_stage
    stages = range(0, world, per_stage * mesh.node)
    members = [stage + node * per_stage + one for stage in stages for one in range(per_stage)]
    stage = own // (per_stage * mesh.node) * per_stage * mesh.node
    return members, [stage + one * per_stage + position for one in range(mesh.node)]


def _on_one_host(members: list[int], wanted: str, waits: Waits) -> Any:
    """Returns a group through shared memory. Returns None on all ranks if it is not possible."""
    store = _Meetings.begin()
    own = members.index(dist.get_rank())
    if len(members) < dist.get_world_size():
        store = PrefixStore("-".join(map(str, members)), store)
    try:
        group, why_not = _penstock.Group.on_one_host(store, (own, len(members)), *waits)
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
