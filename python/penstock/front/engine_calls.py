"""Tells the other ranks that the engine raised an error on this rank.

All ranks make the same call, but the engine may refuse it on one rank only. That rank then runs no
collective, and the other ranks would wait for it in vain ([Note: Turns], src/base/turns.h).
"""

import atexit
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from penstock._native import Bug, ConfigError, RuntimeFault
from penstock.front import ranks, sharded_init, training_device

Made = TypeVar("Made", bound=Callable[..., Any])

# Calls that all ranks make. close() tells the other ranks by itself.
_OF_ALL_RANKS = {
    "__call__": "forward",
    "backward": "backward",
    "step": "step",
    "state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "full_grads": "full_grads",
    "set_grads": "set_grads",
    "param_state": "param_state",
    "set_param_state": "set_param_state",
    "param_grad": "param_grad",
    "save": "save",
    "load": "load",
}


def tell_of_errors(made: Any) -> None:
    """Replaces the methods that all ranks call with ones that tell the other ranks of errors.

    In a forked process they raise an error, and close() does nothing."""
    for name, shown in _OF_ALL_RANKS.items():
        setattr(made, name, _told(getattr(made, name), shown))
    made._end = _of_its_process(made._end)


def _of_its_process(call: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self._ranks.copied:
            call(self, *args, **kwargs)

    return run


def tells_if_refused(call: Made) -> Made:
    """Returns a call that also tells the other ranks if it fails before the ranks meet."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = ranks.meetings()
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if ranks.meetings() == before and _meets(*args[:2], **kwargs):
                ranks.refuse(error, _mesh_of_nodes(*args[1:2], **kwargs))
            raise

    return cast(Made, run)


def _mesh_of_nodes(
    config: Any = None, comm: Any = None, mesh: Any = None, **_: Any
) -> Mapping[str, Any] | None:
    """Returns the values of mesh if nodes train on their own; else None."""
    values = config if isinstance(config, Mapping) else {}
    comm, mesh = comm or values.get("comm"), mesh or values.get("mesh")
    local = isinstance(comm, Mapping) and comm.get("codec") == "local"
    return mesh if local and isinstance(mesh, Mapping) else None


def ended_at_exit() -> "weakref.WeakSet[Any]":
    """Returns a set of engines. At exit, their C++ engines are destroyed while torch can still free
    their memory."""
    engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def end() -> None:
        for engine in list(engines):
            engine.__dict__.pop("_core", None)

    atexit.register(end)
    return engines


def _meets(
    model: Any = None, config: Any = None, comm: Any = None, device: Any = None, **_: Any
) -> bool:
    """Whether the other ranks meet to share memory. Ranks of gloo and device groups do not."""
    if comm is None and isinstance(config, Mapping):
        comm = config.get("comm")
    if isinstance(comm, Mapping) and comm.get("backend") == "gloo":
        return False
    if not isinstance(model, torch.nn.Module):
        return True
    try:
        place = training_device.of_model(model, device, sharded_init.waiting(), warns=False)
    except ConfigError:  # the call itself has raised this error
        place = None
    places = {param.device.type for param in model.parameters()} if place is None else {place.type}
    return places <= {"cpu", "meta"}


def _told(call: Callable[..., Any], shown: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        copied = self._ranks.copied
        if copied and shown != "forward":  # a model that needs no gathers may compute anywhere
            raise RuntimeFault(
                f"[front::{shown}] this process was forked from the engine's (for example as a "
                f"worker of a DataLoader), so it has only a copy of the engine. Call {shown}() in "
                f"the engine's own process"
            )
        try:
            return call(self, *args, **kwargs)
        except (Bug, ConfigError, RuntimeFault) as error:
            core = self.__dict__.get("_core")
            if core is not None and not copied:
                core.calls.failed(shown, f"{type(error).__name__}: {error}")
            raise

    return run
