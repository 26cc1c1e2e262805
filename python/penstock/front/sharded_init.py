"""Builds a model that is larger than the memory of one rank: `with penstock.init(): ...`."""

import atexit
import contextlib
import copy
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import file_weights, ranks, training_device
from penstock.front import (
    storage_guard as storage_guard,  # fixes is_shared() for parameters without values
)
from penstock.front.hollow_ops import Assignments, Built, Ops


# [Note: Init by agreement] Each rank's garbage collector decides when the rank frees the parameters
# of a dropped model, so the ranks do this at different times. The parameters that a rank still
# holds may therefore affect only the memory and files of that rank. The ranks connect and
# disconnect together: every outermost init() makes a new group, and initialize() closes the group
# if the ranks agree that no parameter waits on any rank.
@dataclasses.dataclass
class _Store:
    held: Any  # the parameters that have no engine yet
    own_ranks: ranks.Ranks  # the group of the latest outermost init()

    def close(self) -> None:
        """Ends the group, which the other ranks no longer use."""
        if self.own_ranks.copied:
            return
        self.own_ranks.group.close()
        self.own_ranks.close()

    def nothing_waits(self) -> bool:
        """Whether every parameter in use on this rank has an engine. Frees dropped parameters."""
        try:
            return bool(self.held.empty())
        except RuntimeFault:  # the disk failed, so the waiting parameters have no values
            return True


_shared: list[_Store] = []  # the store of the process, between the first init() and the last engine


@dataclasses.dataclass
class _Context:
    path: str  # folders for shards; "": memory
    device: torch.device  # where the model trains
    weights: file_weights.FileWeights | None
    seen: file_weights.Seen | None  # of the innermost context with weights

    def wrote(self, tensor: torch.Tensor) -> None:
        """Called after a write to a parameter without memory."""
        if self.seen is not None:
            self.seen.wrote(tensor)

    def filled(self, module: torch.nn.Module) -> None:
        """Called with a module that was on the meta device and got memory."""
        if self.seen is not None:
            self.seen.modules.add(module)

    def place(self) -> tuple[str, torch.device]:
        return self.path, self.device


_open: list[_Context] = []  # the innermost last


def is_open() -> bool:
    """Whether a context of init() is open."""
    return bool(_open)


def waiting() -> Any:
    """Returns the store of parameters built under `init()` that have no engine yet, or None."""
    return _shared[0].held if _shared else None


def let_go(mean: Callable[[float], float]) -> None:
    """[all ranks] Closes the group of `init()` if no parameter on any rank waits for an engine.

    `mean` returns the mean of a number over the ranks.
    """
    if _shared and not _open and mean(0.0 if _shared[0].nothing_waits() else 1.0) == 0.0:
        _shared.pop().close()


@atexit.register
def _close() -> None:
    while _shared:
        _shared.pop().close()


def _connect(timeout_s: float) -> Any:
    """[all ranks] Returns the store, connected through a new group ([Note: Init by agreement]).

    The new group also replaces one in which a rank has failed. The ranks meet to make the new
    group, so no rank still uses the earlier group when it is closed.
    """
    own = ranks.Ranks(ranks.Waits(timeout_s))
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
    """Keeps only this rank's shard of a parameter, in the place that the innermost open context
    gives."""
    held = waiting()
    if not held.holds(param) and param.numel() > 0:
        held.hollow(param, *_open[-1].place())


# copy.deepcopy() of a module copies its parameters with these methods. If a parameter is sharded
# here, its copy is sharded as well, inside a context and outside: each rank copies its shard.
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


@contextlib.contextmanager
def _same_generators(held: Any, device: torch.device) -> Iterator[None]:
    """In the context the generators of the CPU and of `device` have the states of rank 0's."""
    chosen = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    places = [() if one is torch else (device,) for one in chosen]
    different = []
    for one, at in zip(chosen, places, strict=True):
        own = one.get_rng_state(*at)
        shared = own.clone()
        held.broadcast(shared)
        one.set_rng_state(shared, *at)
        if not torch.equal(own, shared):
            different.append((one, own, at))
    try:
        yield
    finally:
        for one, own, at in different:
            one.set_rng_state(own, *at)


@contextlib.contextmanager
def _filled(context: _Context, held: Any, strict: bool) -> Iterator[None]:
    """At the end of the context, the model that was built in it gets the values of the files."""
    weights, seen = context.weights, context.seen
    if weights is None or seen is None:
        yield
        return
    handles = [
        torch_modules.register_module_parameter_registration_hook(seen.registered),
        torch_modules.register_module_buffer_registration_hook(seen.registered),
        torch_modules.register_module_module_registration_hook(seen.registered),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    gc.collect()  # modules that were dropped, for example replaced layers
    model = file_weights.root_of(seen.modules, weights.path)
    seen.warn_of_writes(model, weights.path)
    filling = file_weights.Filling(weights, held, strict)
    filling.fill(model, context.place(), lambda: Ops(held, lambda _: None))


@contextlib.contextmanager
def _sharded(context: _Context, held: Any) -> Iterator[None]:
    """In this context parameters lose their memory when modules get them."""
    built = Built(held, lambda: _open[-1].place(), context.wrote, context.filled)
    handle = torch_modules.register_module_parameter_registration_hook(built.registered)
    _open.append(context)
    try:
        with Ops(held, built.keep, context.wrote), Assignments(held, built), built.conversions():
            yield
        built.sweep()
    finally:
        _open.pop()
        handle.remove()


def _context(
    held: Any, path: str, device: training_device.DeviceLike, weights: str | os.PathLike[str] | None
) -> _Context:
    """[all ranks] Returns the context that init() opens. Arguments that are not given are those of
    the context around it."""
    if weights is not None and not isinstance(weights, (str, os.PathLike)):
        raise ConfigError(
            f"[front::init] weights is {weights!r}. Pass the path of a file or a folder"
        )
    outer = _open[-1] if _open else None
    path = path or (outer.path if outer else "")
    held.open(path)
    if device is None and outer is not None:
        device = outer.device
    place = training_device.resolved(device, "init")
    if weights is None:
        return _Context(path, place, None, outer.seen if outer else None)
    return _Context(path, place, file_weights.opened(weights, held), file_weights.Seen())


@contextlib.contextmanager
def init(
    timeout_s: float | None = None,
    path: str | os.PathLike[str] = "",
    *,
    device: training_device.DeviceLike = None,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> Iterator[None]:
    """Shards the parameters of modules that are built or loaded in this context.

    Each rank keeps an equal shard of every parameter, so its memory holds its share of the model
    and at most one full parameter. Shapes, dtypes and `torch.nn.init` work as usual, and the values
    equal those of a plain build: an op on such a parameter runs on its gathered values. Loading
    works tensor by tensor, here or in a later `with penstock.init():`. Reading such a parameter
    outside of the context raises an error. `penstock.initialize()` takes the parameters over.

    All ranks build the same model, from the random state of rank 0. Buffers stay whole.
    `copy.deepcopy` of such a parameter gives a sharded copy, here and later. If a parameter is
    dropped, each rank frees its shard when it collects the parameter.

    Args:
        timeout_s: seconds until a wait for a peer fails; default: as for `comm.timeout_s`.
        path: folders, separated by `:`, for an unlinked file that holds this rank's shards instead
            of memory. Inside another context the default is the path of that context.
        device: where the model will train; its modules make parameters there or on the CPU.
            Default: the device of the outer context, else the machine's accelerator, if any.
        weights: a file `*.safetensors`, or a folder with `model.safetensors` or
            `model.safetensors.index.json`. The model gets its values at the end of the context, as
            from `load_state_dict()`, but `initialize()` reads them, and each rank reads only what
            it keeps. Parameters may be on the meta device.
        strict: False warns of missing and unexpected tensors instead of raising an error.

    Raises:
        RuntimeFault: if a peer has ended or built another model, the disk is full, or a file is
            damaged or differs between ranks.
        ConfigError: if the folder cannot be written, there is no such device or file, or tensors
            of the model and of the files differ.
    """
    if weights is None and not strict:
        raise ConfigError("[front::init] strict=False needs weights=..., which is not given")
    if weights is not None and any(one.weights is not None for one in _open):
        raise ConfigError(
            "[front::init] penstock.init(weights=...) is inside another one with weights, which "
            "would give the same parameters other values. Build the models one after the other"
        )
    held = (
        waiting()
        if _open
        else _connect(ranks.default_timeout_s() if timeout_s is None else timeout_s)
    )
    context = _context(held, os.fspath(path), device, weights)
    with (
        _same_generators(held, context.device),
        _filled(context, held, strict),
        _sharded(context, held),
    ):
        yield


__all__ = ["init"]
