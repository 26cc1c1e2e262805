"""Back ends of torch.distributed with collectives on a device's memory: NCCL, RCCL, XCCL, UCC, and
what is registered as one."""

import datetime
import itertools
import typing
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

# Of the engines of this process: all ranks make the same ones, so their groups find each other.
_engines = itertools.count()
# A back end's own timeout ends the process; before that the engine says which rank is missing.
_LATER = datetime.timedelta(seconds=60)


def name_for(device: torch.device, wanted: str) -> str | None:
    """Of the back end for that device. None where there is none that can be made by its
    name, or another than "auto" is `wanted`: then what is exchanged goes through host memory."""
    if device.type in ("cpu", "meta") or wanted != "auto":
        return None
    found = dist.Backend.default_device_backend_map.get(device.type)
    if found in (None, "gloo") or not dist.is_backend_available(found):
        return None
    plugin = dist.Backend._plugins.get(found.upper())
    return None if plugin is not None and plugin.extended_api else found


def warn_of_idle(device: torch.device) -> None:
    """Of a machine's accelerator, where the model (on `device`) is on the CPU."""
    if device.type != "cpu" or not torch.accelerator.is_available():
        return
    idle = torch.accelerator.current_accelerator()
    warnings.warn(
        f"[front::initialize] the model is on the CPU and trains there, and this machine has "
        f'"{idle}": to train on it, model.to("{idle}") before initialize()',
        RuntimeWarning,
        stacklevel=5,
    )


class DeviceGroups:
    """Makes groups of ranks of one engine. The engine's own, not registered with torch: torch names
    groups by their ranks and number, and one that is made after another was destroyed would meet
    what that one left in the store."""

    def __init__(self, name: str, timeout: datetime.timedelta) -> None:
        self._name, self._timeout = name, timeout + _LATER
        self._engine, self._made = next(_engines), itertools.count()

    def __call__(self, members: list[int]) -> typing.Any:
        """A back end among these ranks, of which this is one; all call it in the same order."""
        ranks = "-".join(map(str, members)) if len(members) < 64 else str(hash(tuple(members)))
        prefix = f"penstock/{self._engine}/{next(self._made)}/{ranks}"
        store = PrefixStore(prefix, distributed_c10d._get_default_store())
        own = members.index(dist.get_rank())
        return _maker(self._name)(store, own, len(members), self._timeout)


def _maker(name: str) -> Callable[..., typing.Any]:
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None:
        maker: Callable[..., typing.Any] = plugin.creator_fn
        return maker
    kind = getattr(dist, f"ProcessGroup{name.upper()}")

    def make(store: typing.Any, rank: int, size: int, timeout: datetime.timedelta) -> typing.Any:
        if not hasattr(kind, "Options"):
            return kind(store, rank, size, timeout)
        options = kind.Options()
        options._timeout = timeout
        return kind(store, rank, size, options)

    return make
