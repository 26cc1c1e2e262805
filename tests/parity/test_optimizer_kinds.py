"""Optimizers that are not elementwise for some parameters or in some steps: each is refused at
initialize(), or at the step that would differ, before a weight changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_optimizers_outside_step import WORLD, Net, Own, inputs, of
from torch import nn

FLAT = {"strategy": "zero3", "optimizer": {"layout": "flat"}}


class Chosen(Own):
    """Divides the gradients of some parameters by their norm, as Muon's auxiliary groups do."""

    def chosen(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return bool(group.get("normed"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, _ in self.each():
            if p.grad is not None and self.chosen(group, p):
                p.grad.div_(p.grad.norm())
        super().step()


class Marked(Chosen):
    def chosen(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return bool(getattr(p, "normed", False))


class Dims(Chosen):
    def chosen(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return p.ndim == group["ndim"]


class Large(Chosen):
    def chosen(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return p.ndim == 2 and min(p.shape) > 8


class Adapts(Own):
    """D-Adaptation's kind: a group's option adds up tiny products of all elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for _, p, _ in self.each():
            if p.grad is not None:
                group["sum"] = group.get("sum", 0.0 * p.sum()) + 1e-14 * (p.grad * p).sum()
        super().step()


class Remembers(Own):
    """Keeps a norm in an attribute, for later steps."""

    norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, _ in self.each():
            self.norm = max(self.norm, float(p.norm()))
        super().step()


class Masks(Own):
    """Makes a mask of the weights in its constructor."""

    def __init__(self, params: Any):
        super().__init__(params)
        for _, p, state in self.each():
            state["mask"] = p.detach().abs() < 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.each():
            if p.grad is not None:
                p.sub_(group["lr"] * torch.where(state["mask"], p.grad, 0))


class Wrapper(torch.optim.Optimizer):
    """Has no groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner
        self.defaults = inner.defaults

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def two_groups(make: Callable[..., Any], **second: Any) -> Callable[[nn.Module], Any]:
    def made(model: nn.Module) -> Any:
        first, *others = model.parameters()
        return make([{"params": [first]}, {"params": others, **second}])

    return made


def marked(model: nn.Module) -> Any:
    model.blocks[1].weight.normed = True
    return Marked(model.parameters())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A mask of the first parameter has one value.
        self.first = nn.Parameter(torch.ones(3))
        self.wide = nn.Linear(12, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(x * torch.ones(12)) * self.first.sum()).sum()


AT_START: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "a group": (Net, two_groups(Chosen, normed=True), "Chosen is not elementwise"),
    "one of ten groups": (
        Net,
        lambda model: Chosen(
            [{"params": [p], "normed": i == 5} for i, p in enumerate(model.parameters())]
        ),
        "Chosen is not elementwise",
    ),
    "an attribute of a parameter": (Net, marked, "Marked is not elementwise"),
    "three dims": (Net, lambda m: Dims(m.parameters(), ndim=3), "Dims is not elementwise"),
    "large matrices": (Wide, lambda model: Large(model.parameters()), "Large is not elementwise"),
    "a small option": (Net, lambda model: Adapts(model.parameters()), "options"),
    "an attribute": (Net, lambda model: Remembers(model.parameters()), "attributes"),
    "a mask": (Wide, lambda model: Masks(model.parameters()), "'mask'"),
    "a wrapper": (Net, lambda model: Wrapper(Own(model.parameters())), "param_groups"),
}


@pytest.mark.parametrize("name", AT_START)
def test_refused_at_initialize(name):
    import penstock  # noqa: PLC0415

    build, make, words = AT_START[name]
    model = build()
    before = of(model)
    with pytest.raises(penstock.ConfigError, match=words):
        penstock.initialize(model, FLAT, optimizer=make(model))
    assert all(torch.equal(value, before[key]) for key, value in of(model).items())


# ---- rules that change after the trial of initialize()

LATE = 20


class Late(Own):
    """Elementwise for LATE steps."""

    seen = 0
    once = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen += 1
        for _, p, _ in self.each():
            if self.seen > LATE and (not self.once or self.seen == LATE + 1):
                p.mul_(1 - 0.1 * p.norm())


class Since(Late):
    once = False


class Warms(Own):
    """Takes smaller steps for LATE steps, by an option of the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        for _, p, _ in self.each():
            if p.grad is not None and group["seen"] <= LATE:
                p.grad.mul_(0.5)
        super().step()


def stepped(make: Callable[..., Any], strategy: str) -> tuple[int, str, Any, Any]:
    """Returns the applied steps, the error, the weights before it and after it."""
    import penstock  # noqa: PLC0415

    model = Net()
    config = {"strategy": strategy, "comm": {"timeout_s": 30}}
    engine = penstock.initialize(model, config, optimizer=make(model.parameters()))
    told, weights = "", []
    for step in range(LATE + 2):
        weights.append(engine.state_dict(rank0_only=False))
        engine.backward(engine(inputs(step, "fp32")[dist.get_rank()]))
        try:
            assert engine.step()
        except penstock.RuntimeFault as error:
            told = str(error)
            break
    weights.append(engine.state_dict(rank0_only=False))
    applied = engine.steps
    engine.close()
    return applied, told, weights[-2], weights[-1]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("make", [Late, Since])
def test_refused_at_the_step_that_differs(make, strategy, pools):
    for applied, told, before, after in pools(WORLD).run(stepped, make, strategy):
        assert applied == LATE, told
        assert f"[front::step] until now {make.__name__} updated slices" in told
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_options_that_change_later(pools):
    for applied, told, _, _ in pools(WORLD).run(stepped, Warms, "zero1"):
        assert (applied, told) == (LATE + 2, "")


# ---- methods outside step() that act on a part of the parameters


class Parts(Own):
    """Methods for one group, one number of dims, or marked parameters."""

    @torch.no_grad()
    def second(self) -> None:
        for p in self.param_groups[1]["params"]:
            p.mul_(0.5)

    @torch.no_grad()
    def three_dims(self) -> None:
        for _, p, _ in self.each():
            if p.ndim == 3:
                p.mul_(0.5)

    @torch.no_grad()
    def marked(self) -> None:
        for _, p, _ in self.each():
            if getattr(p, "mark", False):
                p.mul_(0.5)


def called(name: str, strategy: str) -> tuple[str, Any]:
    import penstock  # noqa: PLC0415

    model = Net()
    model.blocks[1].weight.mark = True
    config = {"strategy": strategy, "precision": "bf16", "comm": {"timeout_s": 30}}
    engine = penstock.initialize(model, config, optimizer=two_groups(Parts)(model))
    engine.backward(engine(inputs(0, "bf16")[dist.get_rank()]))
    engine.step()
    try:
        getattr(engine.optimizer, name)()
        told = ""
    except penstock.RuntimeFault as error:
        told = str(error)
    weights = engine.state_dict(rank0_only=False)
    with engine.gathered():
        shown = of(model)
    for key, value in shown.items():
        assert torch.equal(value, weights[key].bfloat16()), key
    engine.close()
    return told, {key: weights[key] for key in shown}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", ["second", "three_dims", "marked"])
def test_methods_for_some_parameters(name, strategy, pools):
    """A method runs exactly, or is refused if it looks at dims, which shards do not have."""
    model = Net()
    model.blocks[1].weight.mark = True
    optimizer = two_groups(Parts)(model)
    (sum(model(x) for x in inputs(0, "fp32")) / WORLD).backward()
    optimizer.step()
    if name != "three_dims":
        getattr(optimizer, name)()
    for told, weights in pools(WORLD).run(called, name, strategy):
        assert bool(told) == (name == "three_dims"), told
        for key, value in of(model).items():
            assert torch.allclose(weights[key], value, rtol=1e-6, atol=1e-6), key


# ---- an optimizer inside another one


class Outer(torch.optim.Optimizer):
    """Wraps SGD with momentum; `shared`: both keep one state."""

    def __init__(self, params: Any, shared: bool):
        self.inner = torch.optim.SGD(params, lr=0.05, momentum=0.5)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        if shared:
            self.inner.state = self.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def trained(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(inputs(step, "fp32")[0]))
        engine.step()


def test_a_state_inside_is_saved(tmp_path):
    import penstock  # noqa: PLC0415

    model = Net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(4):
        plain.zero_grad()
        model(inputs(step, "fp32")[0]).backward()
        plain.step()
    expected, model = of(model), Net()
    engine = penstock.initialize(model, optimizer=Outer(model.parameters(), shared=True))
    trained(engine, 0, 2)
    engine.save(tmp_path)
    engine.close()
    model = Net()
    engine = penstock.initialize(model, optimizer=Outer(model.parameters(), shared=True))
    engine.load(tmp_path)
    trained(engine, 2, 4)
    engine.close()
    for key, value in of(model).items():
        assert torch.allclose(value, expected[key], rtol=1e-6, atol=1e-6), key


def test_a_state_inside_that_would_not_be_saved(tmp_path):
    import penstock  # noqa: PLC0415

    model = Net()
    engine = penstock.initialize(model, optimizer=Outer(model.parameters(), shared=False))
    trained(engine, 0, 2)
    with pytest.raises((penstock.ConfigError, penstock.RuntimeFault), match='"inner"'):
        engine.save(tmp_path)
    engine.close()


class Begun(Own):
    """Its constructor makes state: a mask that is true everywhere, and a count under a string."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.state["count"] = 0
        for _, p, state in self.each():
            state["mask"] = torch.ones_like(p, dtype=torch.bool)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["count"] += 1
        for _, p, state in self.each():
            if p.grad is not None:
                p.grad.mul_(state["mask"]).mul_(1 / self.state["count"])
        super().step()


def begun(strategy: str) -> Any:
    import penstock  # noqa: PLC0415

    model = Net()
    config = {"strategy": strategy, "comm": {"timeout_s": 30}}
    engine = penstock.initialize(model, config, optimizer=Begun(model.parameters()))
    for step in range(3):
        engine.backward(engine(inputs(step, "fp32")[dist.get_rank()]))
        assert engine.step()
    assert engine.optimizer.state["count"] == 3
    engine.close()
    return of(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_state_that_the_constructor_makes(strategy, pools):
    model = Net()
    optimizer = Begun(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (sum(model(x) for x in inputs(step, "fp32")) / WORLD).backward()
        optimizer.step()
    for ours in pools(WORLD).run(begun, strategy):
        for key, value in of(model).items():
            assert torch.allclose(ours[key], value, rtol=1e-6, atol=1e-6), key
