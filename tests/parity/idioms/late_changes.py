"""Changes of a module's class, and copies of a module's `__dict__`, while the engine is open.

Each row is for the model, for its last layer and for its blocks.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import WHOLE, Group
from idioms.trial import SAMPLES

rows = Group("Classes changed and modules copied by `__dict__` while the engine is open")
Place = Callable[[Any], list[Any]]
PLACES: dict[str, Place] = {
    "the model's": lambda model: [model],
    "a layer's": lambda model: [model.leave],
    "a block's": lambda model: list(model.blocks),
}


def build() -> nn.Module:
    """Each module has a class of its own, so that a change of a class stays in the trial."""
    model = nets.build(type("Net", (nets.Net,), {}))
    model.leave.__class__ = type("Linear", (nn.Linear,), {})
    made = type("Mlp", (nets.Mlp,), {})
    for one in model.blocks:
        one.__class__ = made
    return model


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: forward(self, x) * 2


# ---- changes of the class. Each is a context of a training step.

Change = Callable[[list[Any]], AbstractContextManager[Any]]


@contextmanager
def assigned(modules: list[Any]) -> Iterator[None]:
    kind = type(modules[0])
    kind.forward = doubled(kind.forward)
    yield
    del kind.forward


def patched(modules: list[Any]) -> AbstractContextManager[Any]:
    kind = type(modules[0])
    return mock.patch.object(kind, "forward", doubled(kind.forward))


@contextmanager
def base_patched(modules: list[Any]) -> Iterator[None]:
    kind = type(modules[0]).__bases__[0]
    with mock.patch.object(kind, "forward", doubled(kind.forward)):
        yield


@contextmanager
def swapped(modules: list[Any]) -> Iterator[None]:
    kind = type(modules[0])
    made = type("Other", (kind,), {"forward": doubled(kind.forward)})
    for one in modules:
        one.__class__ = made
    yield
    for one in modules:
        one.__class__ = kind


@contextmanager
def unbound(modules: list[Any]) -> Iterator[None]:
    """Wraps a forward as Accelerate does: wraps its function and binds the result."""
    for one in modules:
        one.forward = types.MethodType(doubled(one.forward.__func__), one)
    yield
    for one in modules:
        del one.forward


CHANGES: dict[str, Change] = {
    "class gets another `forward`": assigned,
    "`forward` is patched for a step (`mock.patch.object`)": patched,
    "base class's `forward` is patched for a step": base_patched,
    "`__class__` is replaced for a step": swapped,
}


def train_changed(t: Any, place: Place, change: Change) -> None:
    model = build()
    t.start(model)
    t.train(1)
    with change(place(model)):
        t.train(2, start=1)
    t.train(1, start=3)


# ---- copies


def clone(module: Any, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copies a module as learn2learn and others do, with other weights."""
    made = type(module).__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {k: None if p is None else value(p) for k, p in module._parameters.items()}
    made._modules = {k: clone(child, value) for k, child in module._modules.items()}
    return made


def evaluate_clone(t: Any, place: Place) -> dict[str, Any]:
    """The copy computes with its own weights, and the model with the old ones."""
    model = build()
    t.start(model)
    t.train(1)
    found: dict[str, Any] = {}
    with torch.no_grad(), t.engine.gathered():
        for index, one in enumerate(place(model)):
            copied = clone(one, lambda p: p.detach().clone().mul_(2))
            width = nets.FEATURES if one is model else nets.WIDTH
            x = nets.ramp(torch.empty(2, width))
            found[f"copy {index}"], found[f"own {index}"] = copied(x), one(x)
            found[f"method {index}"] = copied.forward(x)
    t.train(1, start=1)
    return found


def in_place(t: Any, place: Place) -> dict[str, Any]:
    """`copy.copy`: another module object with the same parameters."""
    model = build()
    t.start(model)
    t.train(1)
    found: dict[str, Any] = {}
    with torch.no_grad(), t.engine.gathered():
        for index, one in enumerate(place(model)):
            copied = type(one).__new__(type(one))
            copied.__dict__.update(one.__dict__)
            copied.extra = 1.0
            width = nets.FEATURES if one is model else nets.WIDTH
            found[f"copy {index}"] = copied(nets.ramp(torch.empty(2, width)))
    t.train(1, start=1)
    return found


def look(t: Any, place: Place) -> dict[str, Any]:
    """What libraries read from a bound `forward`."""
    model = build()
    t.start(model)
    t.train(1)
    told = []
    for one in place(model):
        bound = one.forward
        spec = inspect.getfullargspec(bound)
        told.append(
            [
                bound.__self__ is one,
                spec.args == inspect.getfullargspec(type(one).forward).args,
                list(inspect.signature(bound).parameters)
                == list(inspect.signature(type(one).forward).parameters)[1:],
                inspect.signature(bound.__func__) == inspect.signature(type(one).forward),
                inspect.getsource(bound) == inspect.getsource(type(one).forward),
                bound.__qualname__ == type(one).forward.__qualname__,
                bound.__doc__ == type(one).forward.__doc__,
            ]
        )
    t.train(1, start=1)
    return {"told": torch.tensor(told, dtype=torch.float)}


def train_rebound(t: Any, place: Place) -> None:
    train_changed(t, place, unbound)


for where, its in PLACES.items():
    add = functools.partial(rows, precision=("fp32",), accumulate=(1,))
    for what, how in CHANGES.items():
        add(f"{where} {what}")(functools.partial(train_changed, place=its, change=how))
    add(f"{where} `__dict__` is copied to a module with other weights")(
        functools.partial(evaluate_clone, place=its)
    )
    add(f"{where} `__dict__` is copied to a module with the same weights")(
        functools.partial(in_place, place=its)
    )
    add(f"{where} bound `forward` is inspected")(functools.partial(look, place=its))
    add(f"{where} `forward.__func__` is wrapped and bound again")(
        functools.partial(train_rebound, place=its)
    )


@rows("`nn.Linear.forward` is replaced for the whole process", precision=("fp32",))
def quantised(t: Any) -> None:
    """Quantisation-aware training."""
    t.start(nets.build())
    t.train(1)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.detach().abs().amax() / 7
        near = (self.weight.detach() / scale).round() * scale
        return F.linear(x, self.weight + (near - self.weight.detach()), self.bias)

    with mock.patch.object(nn.Linear, "forward", forward):
        t.train(2, start=1)
    t.train(1, start=3)


@rows(
    "a copy by `__dict__` is trained through (MAML)",
    precision=("fp32",),
    strategy=WHOLE,
)
def maml(t: Any) -> None:
    """Inner steps on the copy, and a loss of the copy that reaches the model's parameters."""
    t.start(nets.build())
    for step in t.steps(3):
        features, targets = t.batch(step)
        task, answers = nets.batch(step + 10, SAMPLES)  # the same task on every rank
        copied = clone(t.model, torch.clone)
        places = [(one, name) for one in copied.modules() for name in one._parameters]
        inner = F.mse_loss(copied(task), answers)
        values = [one._parameters[name] for one, name in places]
        slopes = torch.autograd.grad(inner, values, create_graph=True)
        for (one, name), slope in zip(places, slopes, strict=True):
            one._parameters[name] = one._parameters[name] - 0.1 * slope
        t.engine.backward(t.note(F.mse_loss(copied(features), targets)))
        t.engine.step()
