"""Activation checkpointing (arXiv:1604.06174): a unit keeps its inputs and runs again in backward.

torch.utils.checkpoint runs it again; it also handles random numbers, autocast and early stop. If
activations are offloaded, saved-tensor hooks around the call pass the saved inputs to the engine.
Tensors saved inside the unit do not pass through these hooks.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from penstock._native import RuntimeFault
from penstock.front import module_tree
from penstock.front.forward_guard import Forward

_SMALL_BYTES = 64 << 10


def _is_kept(buffer: torch.Tensor) -> bool:
    return not buffer.is_cpu and buffer.nbytes <= _SMALL_BYTES


class _Buffers:
    """Copies of buffers that a forward changes (batch norm's statistics), made before that forward.

    The recomputed forward reads and changes these copies. So it computes the same values, and the
    module's own buffers change once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._kept = [
            (owner._buffers, name, buffer, buffer.detach().clone())
            for _, owner in module_tree.modules_of(module)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def keep_changed(self) -> None:
        """Drops the unchanged buffers, after the forward. Compares values, because batch norm's
        writes do not increase version counters. Small copies on a device are kept without a
        comparison, because the host would have to wait for it."""
        self._kept = [
            (place, name, buffer, before)
            for place, name, buffer, before in self._kept
            if place.get(name) is not buffer or _is_kept(buffer) or not torch.equal(buffer, before)
        ]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(place, name, place.get(name)) for place, name, _, _ in self._kept]
        for place, name, _, before in self._kept:
            place[name] = before.clone()
        try:
            yield
        finally:
            for place, name, buffer in now:
                place[name] = buffer


class _Objects:
    """The states that objects among a forward's arguments (a key-value cache) had before it.

    The objects have these states while the forward is recomputed. If the forward wrote in place to
    a tensor in an object, the tensor cannot be restored.
    """

    def __init__(self, unit: str, arguments: Any) -> None:
        self._unit = unit
        self._kept = [(one, module_tree.State(one)) for one in module_tree.objects_in(arguments)]
        self._tensors = [
            (type(one).__name__, tensor, tensor._version)
            for one, state in self._kept
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        ]

    def keep_changed(self) -> None:
        """Drops the unchanged objects, after the forward.

        Raises RuntimeFault if the forward wrote to a tensor in place.
        """
        for kind, tensor, version in self._tensors:
            if tensor._version != version:
                raise RuntimeFault(
                    f'[front::checkpoint] unit "{self._unit}" wrote in place to a tensor in one of '
                    f"its arguments (in a {kind}), so it cannot be recomputed in backward. Leave "
                    f'the argument out (for example use_cache=False), or leave out "activations.'
                    f'checkpoint"'
                )
        self._tensors.clear()
        self._kept = [(one, before) for one, before in self._kept if not before.is_of(one)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(one, module_tree.State(one)) for one, _ in self._kept]
        for one, before in self._kept:
            before.put_in(one)
        try:
            yield
        finally:
            for one, state in now:
                state.put_in(one)


# What torch keeps in a module's `__dict__`, except its mode.
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}


class _Fields:
    """The fields that a unit's modules had before a forward: modes, counters, lists.

    The modules have these fields while the forward is recomputed, and then their current
    fields again.
    """

    def __init__(self, unit: str, module: torch.nn.Module) -> None:
        self._unit = unit
        self._kept = [
            (vars(one), {k: v for k, v in vars(one).items() if k not in _OF_TORCH})
            for _, one in module_tree.modules_of(module)
        ]
        self._containers = [
            (value, module_tree.State(value))
            for _, fields in self._kept
            for value in fields.values()
            if type(value) in module_tree.CONTAINERS
        ]
        self._tensors = [
            (place, name, value, value._version, _copy_of(value))
            for place, fields in self._kept
            for name, value in fields.items()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]
        self._written: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def values(self) -> Iterator[Any]:
        for _, fields in self._kept:
            yield from fields.values()

    def keep_changed(self) -> None:
        """Keeps, after the forward, the values of tensors that it wrote to in place.

        Raises RuntimeFault if such a tensor is large.
        """
        for place, name, tensor, version, before in self._tensors:
            if tensor._version != version and before is not None:
                self._written.append((place, name, before))
            elif tensor._version != version:
                raise RuntimeFault(
                    f'[front::checkpoint] unit "{self._unit}" wrote in place to the tensor '
                    f'"{name}" of one of its modules, so it cannot be recomputed in backward. Make '
                    f"it a buffer (register_buffer), assign a new tensor (self.{name} = ...), or "
                    f'leave out "activations.checkpoint"'
                )
        self._tensors.clear()

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        now = [
            (place, {k: v for k, v in place.items() if k not in _OF_TORCH})
            for place, _ in self._kept
        ]
        items = [(one, module_tree.State(one)) for one, _ in self._containers]
        for one, state in self._containers:
            state.put_in(one)
        _set_fields(self._kept)
        for place, name, before in self._written:
            place[name] = before.clone()
        try:
            yield
        finally:
            _set_fields(now)
            for one, state in items:
                state.put_in(one)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a small tensor, such as a counter."""
    return tensor.detach().clone() if tensor.numel() <= 1024 else None


def _set_fields(fields: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for place, values in fields:
        for name in [name for name in place if name not in _OF_TORCH and name not in values]:
            del place[name]
        place.update(values)


# Getters and setters for the states of other generators. These states are restored for a
# recomputation.
GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []


class _RandomStates:
    """Random generators that torch does not restore, with their states before a forward: `random`,
    `numpy.random`, generators in the fields of modules, and GENERATORS."""

    def __init__(self, values: Iterator[Any]) -> None:
        numpy: Any = sys.modules.get("numpy.random")
        own = [one for one in values if not isinstance(one, (str, int, float, type(None)))]
        found: list[Any] = [random, *([] if numpy is None else [numpy]), *own]
        calls = [one for one in map(_state_calls, found) if one] + GENERATORS
        self._kept = [(get, put, get()) for get, put in calls]

    def keep_changed(self) -> None:
        """Drops the generators that the forward did not use."""
        self._kept = [(get, put, was) for get, put, was in self._kept if not _equal(get(), was)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(put, get()) for get, put, _ in self._kept]
        for _, put, before in self._kept:
            put(before)
        try:
            yield
        finally:
            for put, state in now:
                put(state)


def _state_calls(one: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the getter and the setter of a random generator's state; None for other objects."""
    if one is random or isinstance(one, random.Random):
        return one.getstate, one.setstate
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if one is numpy or isinstance(one, numpy.RandomState):
        return lambda: one.get_state(legacy=False), one.set_state
    if isinstance(one, numpy.Generator):
        bits = one.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(
            _equal(value, other[name]) for name, value in state.items()
        )
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    # numpy's arrays compare by element.
    return bool(state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other)


class Recomputed:
    """A unit's forward that backward recomputes. `remove()` restores the module's own forward."""

    def __init__(self, module: torch.nn.Module, name: str, unit: int, recomputation: Any) -> None:
        self._module, self._name, self._unit = module, name, unit
        self._recomputation = recomputation
        self._forward = Forward(module, self._around)

    def remove(self) -> None:
        self._forward.remove()

    def _around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return self._checkpoint(inner, args, kwargs)

    def _checkpoint(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors, left = module_tree.take_out((args, kwargs))
        first = [(args, kwargs)]  # released by the first run
        buffers, objects = _Buffers(self._module), _Objects(self._name, (args, kwargs))
        fields = _Fields(self._name, self._module)
        states = _RandomStates(fields.values())

        def run(*inputs: torch.Tensor) -> Any:
            if first:
                own_args, own_kwargs = first.pop()
                return inner(*own_args, **own_kwargs)
            again_args, again_kwargs = module_tree.put_in(inputs, left)
            self._recomputation.begin(self._unit)
            with buffers.as_before(), objects.as_before(), fields.as_before(), states.as_before():
                return inner(*again_args, **again_kwargs)

        with self._hooks():
            output = checkpoint(run, *tensors, use_reentrant=False)
        buffers.keep_changed()
        objects.keep_changed()
        fields.keep_changed()
        states.keep_changed()
        return output

    def _hooks(self) -> contextlib.AbstractContextManager[Any]:
        if not self._recomputation.moves_inputs:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._recomputation.save(self._unit, tensor), lambda fetch: fetch()
        )
