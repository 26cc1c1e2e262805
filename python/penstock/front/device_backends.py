"""Back ends of torch.distributed with collectives on device memory: NCCL, RCCL, XCCL, UCC, and
back ends that other packages register with torch."""

import collections
import contextlib
import datetime
import itertools
import os
import typing
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions
from torch.distributed import distributed_c10d

# Number of the next engine. All ranks make the same engines, so their keys in the store match.
_engines = itertools.count()
# A back end's own timeout ends the process. The engine's timeout is shorter, and its error names
# the missing rank.
_LATER = datetime.timedelta(seconds=60)
# ProcessGroupNCCL reads these variables when it is made. With a blocking wait it starts no watchdog
# thread and keeps no list of works. After a network error, that thread would hold a lock that every
# collective needs, sleep for a minute, and then end the process without naming a rank. The engine's
# collectives are synchronous, so nothing blocks. XCCL follows NCCL.
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_XCCL_BLOCKING_WAIT": "1"}


def name_for(device: torch.device, wanted: str) -> str | None:
    """Returns the name of the back end for that device. Returns None if torch has no such
    back end, or if `wanted` is not "auto". Exchanges then go through host memory."""
    if device.type in ("cpu", "meta") or wanted != "auto":
        return None
    found = dist.Backend.default_device_backend_map.get(device.type)
    if found in (None, "gloo") or not dist.is_backend_available(found):
        return None
    return found if _kind(found) is not None or _plugin(found) is not None else None


class DeviceGroups:
    """Makes the groups of one engine. They are not registered with torch, because torch names a
    group by its ranks and its number. Under such a name, a new group could find keys of a destroyed
    group in the store."""

    def __init__(
        self, name: str, timeout: datetime.timedelta, has_stages: bool, ranks: list[int]
    ) -> None:
        # Since NCCL 2.26 the order of launches on the host is also the order on the device. Where
        # this makes a collective begin only after the previous one has ended, pipeline stages would
        # wait for each other in a circle, because each launches its send before its receive.
        if not has_stages or _begins_in_order():
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        self._name, self._timeout = name, timeout + _LATER
        self._ranks = ranks
        self._engine = next(_engines)
        self._made: collections.Counter[str] = collections.Counter()

    def __call__(self, members: list[int]) -> typing.Any:
        """Makes a back end for `members`, including this rank. They are numbered as in the engine's
        group. All members call it in the same order."""
        members = [self._ranks[member] for member in members]
        ranks = "-".join(map(str, members)) if len(members) < 64 else str(hash(tuple(members)))
        # Counted for each set of ranks, because a rank is in groups in which its peers are not.
        prefix = f"penstock/{self._engine}/{self._made[ranks]}/{ranks}"
        self._made[ranks] += 1
        # A clone has a connection of its own. A rank that waits for its peers locks its connection.
        default: typing.Any = distributed_c10d._get_default_store()
        store = PrefixStore(prefix, default.clone())
        own = members.index(dist.get_rank())
        return _make(self._name, store, own, members, self._timeout)


def _begins_in_order() -> bool:
    """Whether NCCL orders only the starts of collectives, not their ends. This needs CUDA 12.3 or
    later, in torch and in the driver."""
    if torch.version.cuda is None:
        return False
    made = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    compiled: typing.Any = torch._C  # a build for CPUs lacks the function
    driver = compiled._cuda_getDriverVersion()  # 12030 is 12.3
    return min(made, (driver // 1000, driver % 1000 // 10)) >= (12, 3)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process for the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kind(name: str) -> typing.Any:
    """Returns the class of a back end of torch itself, or None."""
    return getattr(dist, f"ProcessGroup{name.upper()}", None)


def _plugin(name: str) -> typing.Any:
    """Returns what `register_backend()` was given for a back end, or None."""
    return dist.Backend._plugins.get(name.upper())


def _make(
    name: str, store: typing.Any, rank: int, members: list[int], timeout: datetime.timedelta
) -> typing.Any:
    """Makes a back end as torch's `init_process_group()` does. torch's own class has precedence,
    because torch 2.14 registers its own back ends as plugins, too."""
    kind, plugin, size = _kind(name), _plugin(name), len(members)
    if kind is not None and hasattr(kind, "Options"):
        options = kind.Options()
        options._timeout = timeout
        with _environment(_UNWATCHED):
            return kind(store, rank, size, options)
    if kind is not None:
        return kind(store, rank, size, timeout)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    described = _DistributedBackendOptions()
    described.store, described.timeout = store, timeout
    described.group_rank, described.group_size = rank, size
    described.group_id, described.global_ranks_in_group = f"penstock-{rank}", list(members)
    return plugin.creator_fn(described, None)
