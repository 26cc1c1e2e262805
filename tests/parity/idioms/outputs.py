"""What models take and return."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import Group, either, raises

rows = Group("Inputs and outputs")
ONE = (1,)


class Wraps(nets.Net):
    """`wrap` makes the output, of the model and of its second block."""

    def __init__(self, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]):
        super().__init__()
        self.wrap, self.unwrap = wrap, unwrap
        self.blocks[1] = Wrapped(wrap)

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.enter(features.to(self.enter.weight.dtype)))
        return self.blocks[2](self.unwrap(self.blocks[1](x)))

    def forward(self, features: torch.Tensor) -> Any:
        return self.wrap(super().forward(features))


class Wrapped(nets.Mlp):
    def __init__(self, wrap: Callable[[Any], Any]):
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


def wrapped(t: Any, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> None:
    t.start(nets.models.fill(Wraps(wrap, unwrap)))
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: unwrap(t.engine(x))))
        t.engine.step()


@dataclasses.dataclass
class Output:
    value: Any
    others: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    value: Any


@dataclasses.dataclass
class SlotsOutput:
    __slots__ = ("value",)
    value: Any


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Plain:
    def __init__(self, value: Any):
        self.value = value


class Pair(NamedTuple):
    value: Any
    other: Any


class OrderedOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As `transformers` has: its items are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def cyclic(value: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"value": value}
    made["self"] = made
    return made


def cyclic_object(value: Any) -> Plain:
    made = Plain(value)
    made.itself = made  # type: ignore[attr-defined]
    return made


def by_attribute(output: Any) -> Any:
    return output.value


def by_key(output: Any) -> Any:
    return output["value"]


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a tuple with `None`": (lambda x: (x, None, "text"), lambda out: out[0]),
    "a list of lists": (lambda x: [[x], []], lambda out: out[0][0]),
    "a dict": (lambda x: {"value": x, "other": 1}, by_key),
    "a dict that contains itself": (cyclic, by_key),
    "a dataclass": (Output, by_attribute),
    "a frozen dataclass": (FrozenOutput, by_attribute),
    "a dataclass with slots": (SlotsOutput, by_attribute),
    "an object with slots": (Slots, by_attribute),
    "an object": (Plain, by_attribute),
    "an object that contains itself": (cyclic_object, by_attribute),
    "a named tuple": (lambda x: Pair(x, x.detach()), by_attribute),
    "a dict with attributes": (lambda x: OrderedOutput(value=x), by_attribute),
    "a `defaultdict`": (lambda x: collections.defaultdict(list, value=x), by_key),
    "a `deque`": (lambda x: collections.deque([x]), lambda out: out[0]),
    "a `SimpleNamespace` in a tuple": (
        lambda x: (Plain({"a": [x]}),),
        lambda o: o[0].value["a"][0],
    ),
    "a generator": (lambda x: iter([x]), next),
    "a closure": (lambda x: lambda: x, lambda out: out()),
    "a set of tensors": (lambda x: {x}, lambda out: next(iter(out))),
}


def returns(wrap: Any, unwrap: Any) -> Callable[[Any], None]:
    return lambda t: wrapped(t, wrap, unwrap)


HIDDEN = ("a generator", "a closure", "an object with slots", "a `deque`", "a set of tensors")
for _title, (_wrap, _unwrap) in KINDS.items():
    _others = {"sharded": either()} if _title in HIDDEN else {}
    rows(f"the model and a block return {_title}", **_others)(returns(_wrap, _unwrap))


# ---- more of outputs


class Several(nets.Net):
    def forward(self, features: torch.Tensor) -> Any:
        x = self.trunk(features)
        return self.leave(x).squeeze(-1), x, [x.detach(), features]


@rows("several outputs, with a loss of only one")
def several(t: Any) -> None:
    t.start(nets.build(Several))
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: t.engine(x)[0]))
        t.engine.step()


@rows("losses of all outputs, in turns")
def several_in_turns(t: Any) -> None:
    t.start(nets.build(Several))
    for step in t.steps(4):
        x, y = t.batch(step)
        first, hidden, _ = t.engine(x)
        loss = hidden.float().pow(2).mean() if step % 2 else F.mse_loss(first.float(), y)
        t.engine.backward(t.note(loss))
        t.engine.step()


class Collects(nets.Net):
    """Keeps its activations on itself, where its loss reads them."""

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        self.kept = []
        x = self.enter(features.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = block(x)
            self.kept.append(x)
        return x


@rows("a loss of activations that the model keeps on itself")
def kept(t: Any) -> None:
    t.start(nets.build(Collects))
    for step in t.steps(3):
        loss = t.loss(step)
        loss = loss + sum(x.float().pow(2).mean() for x in t.model.kept)
        t.engine.backward(t.note(loss))
        t.engine.step()


@rows("a loss of an activation that a hook has kept, without the output")
def kept_by_hook(t: Any) -> None:
    t.start()
    seen: list[torch.Tensor] = []
    t.model.blocks[1].register_forward_hook(lambda _m, _i, x: seen.append(x))
    for step in t.steps(2):
        seen.clear()
        t.engine(t.batch(step)[0])
        t.engine.backward(t.note(seen[0].float().pow(2).mean()))
        t.engine.step()


class OwnLoss(nets.Net):
    def forward(self, features: torch.Tensor, targets: Any = None, *, scale: float = 1.0) -> Any:
        output = super().forward(features)
        if targets is None:
            return output
        return {"loss": scale * F.mse_loss(output.float(), targets), "output": output}


@rows("a model that returns its loss, with keyword arguments")
def own_loss(t: Any) -> None:
    t.start(nets.build(OwnLoss))
    for step in t.steps(3):
        x, y = t.batch(step)
        t.engine.backward(t.note(t.engine(features=x, targets=y, scale=0.5)["loss"]))
        t.engine.step()


@rows("an output that is edited in place")
def edited_output(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: t.engine(x).mul_(2)))
        t.engine.step()


@rows("a block's output that the next module edits in place")
def edited_inside(t: Any) -> None:
    t.start()
    t.model.blocks[0].register_forward_hook(lambda _m, _i, x: F.relu_(x))
    t.train(3)


@rows("an output that is a view")
def view_output(t: Any) -> None:
    t.start()
    t.model.blocks[1].register_forward_hook(lambda _m, _i, x: x[:, :].view_as(x))
    t.train(3)


@rows("the input, edited in place by the model")
def edited_input(t: Any) -> None:
    t.start()
    t.model.register_forward_pre_hook(lambda _m, inputs: (inputs[0].mul_(0.5),))
    t.train(3)


@rows("an input that needs a gradient, from a module beside the engine")
def input_from_module(t: Any) -> dict[str, Any]:
    t.start()
    torch.manual_seed(3)
    lift = nn.Linear(6, 6)
    for step in t.steps(2):
        t.engine.backward(t.loss(step, lambda x: t.engine(lift(x))))
        t.engine.step()
    return {"grad": lift.weight.grad is not None}


@rows("inputs that are not contiguous, from inference mode or numpy")
def odd_inputs(t: Any) -> None:
    t.start()
    with torch.inference_mode():
        made = torch.ones(4, 6)
    for step in t.steps(3):
        x, _ = t.batch(step)
        with torch.no_grad():
            t.engine(made)
        x = torch.from_numpy(x.t().contiguous().numpy()).t()
        assert not x.is_contiguous() or len(x) == 1
        t.engine.backward(t.engine(x).float().pow(2).mean())
        t.engine.step()


@rows("batches of another size in each step")
def sizes(t: Any) -> None:
    t.start()
    for step in t.steps(4):
        x, y = t.batch(step)
        keep = (2 + 2 * (step % 2)) // t.world
        t.engine.backward(t.note(F.mse_loss(t.engine(x[:keep]).float(), y[:keep])))
        t.engine.step()


@rows("a rank that has no samples in this step", world=(2,))
def no_samples(t: Any) -> None:
    """The sum over samples, divided by how many there are on all ranks."""
    t.start()
    for step in t.steps(3):
        x, y = nets.batch(step, 4)
        if t.rank == 1:
            x, y = x[:0], y[:0]
        loss = F.mse_loss(t.engine(x).float(), y, reduction="sum") / 4
        t.engine.backward(loss if t.plain else loss * 2)
        t.engine.step()


@rows("a model without arguments, with a loss of only its parameters")
def no_arguments(t: Any) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.point.float().pow(2).sum()

    t.start(nets.build(Alone))
    for _ in t.steps(3):
        t.engine.backward(t.note(t.engine()))
        t.engine.step()


class Yields(nets.Net):
    def stages(self, features: torch.Tensor) -> Iterator[torch.Tensor]:
        x = self.enter(features.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = block(x)
            yield self.leave(x).squeeze(-1)

    def forward(self, features: torch.Tensor) -> Any:
        return self.stages(features)


@rows("a forward that is a generator, run after the call", sharded=either())
def lazy_forward(t: Any) -> None:
    t.start(nets.build(Yields))
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: sum(t.engine(x))))
        t.engine.step()


@rows("a forward that returns nothing", raises("NoneType"))
def nothing(t: Any) -> None:
    class Silent(nets.Net):
        def forward(self, features: torch.Tensor) -> Any:
            super().forward(features)

    t.start(nets.build(Silent))
    t.loss(0)
