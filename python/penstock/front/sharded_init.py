"""Builds a model that is larger than the memory of one rank: `with penstock.init(): ...`."""

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import ranks
from penstock.front import (
    storage_guard as storage_guard,  # fixes is_shared() for parameters without values
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Ops that write every value of their first argument and read none of it.
_OVERWRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
    torch.ops.aten.random_.default,
}

# The process has one store while a parameter built under init() waits for its engine.
_shared: list[tuple[Any, ranks.Ranks, str]] = []


def waiting() -> Any:
    """Returns the store of parameters built under `init()` that have no engine yet, or None."""
    return _shared[0][0] if _shared else None


_num_open = 0  # number of nested contexts


def _nothing_waits(held: Any) -> bool:
    try:
        return bool(held.empty)
    except RuntimeFault:  # the disk failed, so the waiting parameters have no values
        return True


def let_go(at_exit: bool = False) -> None:
    """Closes the group of ranks of `init()` when no parameter waits for an engine."""
    if _shared and (at_exit or (_num_open == 0 and _nothing_waits(_shared[0][0]))):
        _, own_ranks, _ = _shared.pop()
        own_ranks.group.close()
        own_ranks.close()


atexit.register(let_go, at_exit=True)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that the op writes: its first argument, `out=`, or tensors in a list."""
    written: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written


def _is_view(func: Any) -> bool:
    """Whether the op returns a view of the same storage and reads no value."""
    aliases = any(result.alias_info is not None for result in func._schema.returns)
    writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
    return aliases and not writes


class _Hollow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op on parameters without values on their full values, gathered for that op."""

    def __init__(self, held: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = _pytree.tree_flatten((args, kwargs))
        hollow = [t for t in flat if isinstance(t, torch.Tensor) and self._held.holds(t)]
        if not hollow or _is_view(func):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        values: dict[int, torch.Tensor] = {}
        for tensor in hollow:
            key = tensor.untyped_storage()._cdata
            if key in values:
                continue
            all_new = (
                func in _OVERWRITES
                and tensor is args[0]
                and tensor.nbytes == tensor.untyped_storage().nbytes()
                and sum(one is tensor for one in hollow) == 1
            )
            values[key] = self._held.scratch(tensor) if all_new else self._held.whole(tensor)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not self._held.holds(value):
                return value
            whole = values[value.untyped_storage()._cdata]
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())

        real_args, real_kwargs = _pytree.tree_unflatten([real(value) for value in flat], spec)
        result = func(*real_args, **real_kwargs)
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and self._held.holds(tensor):
                self._held.keep(tensor, values[tensor.untyped_storage()._cdata])
        values.clear()
        real_written = _written(func, real_args, real_kwargs)
        in_place = {id(own): given for own, given in zip(real_written, written, strict=True)}
        return _pytree.tree_map(lambda value: in_place.get(id(value), value), result)


def _same_generator(held: Any) -> torch.Tensor | None:
    """Sets the CPU generator of every rank to that of rank 0. Returns this rank's previous state if
    it was different."""
    own = torch.get_rng_state()
    shared = own.clone()
    held.broadcast(shared)
    torch.set_rng_state(shared)
    return None if torch.equal(own, shared) else own


@contextlib.contextmanager
def init(timeout_s: float = 600.0, path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Shards the parameters of modules that are built or loaded in this context.

    Each rank keeps an equal shard of every parameter, so its memory holds its share of the model
    and at most one full parameter. Shapes, dtypes and `torch.nn.init` work as usual, and the values
    equal those of a plain build: an op on such a parameter runs on its gathered values. Loading
    works tensor by tensor, here or in a later `with penstock.init():`. Reading such a parameter
    outside of the context raises an error. `penstock.initialize()` takes the parameters over.

    All ranks build the same model, from the random state of rank 0. Buffers stay whole.

    Args:
        timeout_s: seconds until a wait for a peer fails.
        path: folders, separated by `:`, for an unlinked file that holds this rank's shards instead
            of memory.

    Raises:
        RuntimeFault: if a peer has ended or built another model, or the disk is full.
        ConfigError: if the folder cannot be written, or an earlier context had another folder and
            its parameters still wait for their engine.
    """
    global _num_open
    let_go()  # frees the shards of an earlier model that could not be built
    place = os.fspath(path)
    if not _shared:
        own_ranks = ranks.Ranks(timeout_s)
        held = _penstock.ShardedInit(own_ranks.group, place)
        _shared.append((held, own_ranks, place))
    held, _, first = _shared[0]
    if place and place != first:
        raise ConfigError(
            f'[front::init] path "{place}": parameters that wait for their engine are in '
            f'"{first or "memory"}", and all must go to one place. initialize() their model first'
        )
    own = _same_generator(held)

    def registered(_module: Any, name: str, param: torch.nn.Parameter | None) -> None:
        if param is None or param.device.type == "meta" or param.dtype not in _DTYPES:
            return
        if param.device.type != "cpu":
            raise ConfigError(
                f'[front::init] parameter "{name}" is made on {param.device}, but under '
                "penstock.init() parameters are made on the CPU, in shards, and train there. "
                "Build a model that fits on a device without init()"
            )
        if not held.holds(param) and param.numel() > 0:
            held.hollow(param)

    handle = register_module_parameter_registration_hook(registered)
    _num_open += 1
    try:
        with _Hollow(held):
            yield
    finally:
        _num_open -= 1
        handle.remove()
        if own is not None:
            torch.set_rng_state(own)


__all__ = ["init"]
