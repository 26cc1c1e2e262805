"""Builds a model that is larger than the memory of one rank: `with penstock.init(): ...`."""

import atexit
import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock._native import RuntimeFault, _penstock
from penstock.front import ranks
from penstock.front import (
    storage_guard as storage_guard,  # fixes is_shared() for parameters without values
)
from penstock.front.hollow_ops import Assignments, Built, Ops


# [Note: Init by agreement] Ranks free the parameters of a dropped model at different times, because
# each rank's garbage collector decides when. So what a rank still holds may only decide about this
# rank's memory and files. The ranks connect and disconnect together: every outermost init() makes a
# new group, and initialize() closes it if the ranks agree that no parameter waits on any rank.
@dataclasses.dataclass
class _Store:
    held: Any  # the parameters that have no engine yet
    own_ranks: ranks.Ranks  # the group of the latest outermost init()

    def close(self) -> None:
        """Ends the group, which the other ranks no longer use."""
        self.own_ranks.group.close()
        self.own_ranks.close()

    def nothing_waits(self) -> bool:
        """Whether no parameter that is in use on this rank waits. Frees dropped parameters."""
        try:
            return bool(self.held.empty())
        except RuntimeFault:  # the disk failed, so the waiting parameters have no values
            return True


_shared: list[_Store] = []  # the store of the process, between the first init() and the last engine
_paths: list[str] = []  # `path` of each open context, the innermost last


def waiting() -> Any:
    """Returns the store of parameters built under `init()` that have no engine yet, or None."""
    return _shared[0].held if _shared else None


def let_go(mean: Callable[[float], float]) -> None:
    """[all ranks] Closes the group of `init()` when no parameter of any rank waits for an engine.

    `mean` returns the mean of a number over the ranks.
    """
    if _shared and not _paths and mean(0.0 if _shared[0].nothing_waits() else 1.0) == 0.0:
        _shared.pop().close()


@atexit.register
def _close() -> None:
    while _shared:
        _shared.pop().close()


def _connect(timeout_s: float) -> Any:
    """[all ranks] Returns the store, connected through a new group ([Note: Init by agreement]).

    The new group also replaces one in which a rank has failed. The ranks meet when they make it, so
    no rank still uses the earlier group when that is closed.
    """
    own = ranks.Ranks(timeout_s)
    earlier = _shared.pop() if _shared else None
    places = (own.group.rank, own.group.size)
    if earlier is None or places != (earlier.own_ranks.group.rank, earlier.own_ranks.group.size):
        _shared.append(_Store(_penstock.ShardedInit(own.group), own))
    else:
        earlier.nothing_waits()  # frees the parameters of an earlier model that was dropped
        earlier.held.connect(own.group)
        _shared.append(_Store(earlier.held, own))
    if earlier is not None:
        earlier.close()
    return _shared[0].held


def shard(param: torch.Tensor) -> None:
    """Leaves this rank its shard of a parameter, in the place of the innermost open context."""
    held = waiting()
    if not held.holds(param) and param.numel() > 0:
        held.hollow(param, _paths[-1])


# copy.deepcopy() of a module copies its parameters with these methods. The copy of a parameter that
# is sharded here is sharded as well, inside of a context and outside: each rank copies its shard.
_deepcopy_parameter: Callable[..., Any] = torch.nn.Parameter.__deepcopy__
_deepcopy_tensor: Callable[..., Any] = torch.Tensor.__deepcopy__


def _copied_parameter(self: torch.nn.Parameter, memo: dict[Any, Any]) -> Any:
    held = waiting()
    if held is None or id(self) in memo or not held.holds(self):
        return _deepcopy_parameter(self, memo)
    memo[id(self)] = made = type(self)(held.copy(self.data), self.requires_grad)
    return made


def _copied_tensor(self: torch.Tensor, memo: dict[Any, Any]) -> Any:
    held = waiting()
    plain = type(self) is torch.Tensor and self.is_leaf and id(self) not in memo
    if held is None or not plain or not held.holds(self):
        return _deepcopy_tensor(self, memo)
    copies = memo.setdefault("penstock", {})  # by storage: views of one tensor stay views of one
    key = self.untyped_storage()._cdata
    if key not in copies:
        copies[key] = held.copy(self.detach())
    made = copies[key].as_strided(self.shape, self.stride(), self.storage_offset()).detach()
    memo[id(self)] = made.requires_grad_(self.requires_grad)
    made.__dict__ = copy.deepcopy(self.__dict__, memo)
    return made


torch.nn.Parameter.__deepcopy__ = _copied_parameter  # type: ignore[method-assign,assignment]
torch.Tensor.__deepcopy__ = _copied_tensor  # type: ignore[method-assign]


def _same_generator(held: Any) -> torch.Tensor | None:
    """Sets the CPU generator of every rank to that of rank 0. Returns this rank's previous state if
    it was different."""
    own = torch.get_rng_state()
    shared = own.clone()
    held.broadcast(shared)
    torch.set_rng_state(shared)
    return None if torch.equal(own, shared) else own


@contextlib.contextmanager
def init(timeout_s: float | None = None, path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Shards the parameters of modules that are built or loaded in this context.

    Each rank keeps an equal shard of every parameter, so its memory holds its share of the model
    and at most one full parameter. Shapes, dtypes and `torch.nn.init` work as usual, and the values
    equal those of a plain build: an op on such a parameter runs on its gathered values. Loading
    works tensor by tensor, here or in a later `with penstock.init():`. Reading such a parameter
    outside of the context raises an error. `penstock.initialize()` takes the parameters over.

    All ranks build the same model, from the random state of rank 0. Buffers stay whole.
    `copy.deepcopy` of such a parameter gives a sharded copy, here and later. A parameter that is
    dropped frees its shard, on each rank when that rank collects it.

    Args:
        timeout_s: seconds until a wait for a peer fails; default: as for `comm.timeout_s`.
        path: folders, separated by `:`, for an unlinked file that holds this rank's shards instead
            of memory. Inside another context the default is the path of that context.

    Raises:
        RuntimeFault: if a peer has ended or built another model, or the disk is full.
        ConfigError: if the folder cannot be written.
    """
    if _paths:
        held = waiting()
    else:
        held = _connect(ranks.default_timeout_s() if timeout_s is None else timeout_s)
    place = os.fspath(path) or (_paths[-1] if _paths else "")
    held.open(place)
    own = _same_generator(held)

    built = Built(held, lambda: _paths[-1])
    handle = register_module_parameter_registration_hook(built.registered)
    _paths.append(place)
    try:
        with Ops(held, built.keep), Assignments(held, built), built.conversions():
            yield
        built.sweep()
    finally:
        _paths.pop()
        handle.remove()
        if own is not None:
            torch.set_rng_state(own)


__all__ = ["init"]
