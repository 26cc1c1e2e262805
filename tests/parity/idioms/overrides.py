"""Models that override methods of `torch.nn.Module`, in the class or on the instance.

Every row trains, reads the state, saves, trains, loads, trains again, closes and goes on in plain
torch: `story()`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from idioms import nets, trial
from idioms.table import Group, Outcome, refused

rows = Group("Overrides of `state_dict`, `parameters`, `named_modules` and the like")
Change = Callable[[nn.Module], Any]


def story(t: Any, model: nn.Module, before_close: Change | None = None) -> dict[str, Any]:
    t.start(model)
    t.train(1)
    state = trial.tensors(t.engine.state_dict(rank0_only=False))
    t.engine.save(t.folder)
    t.train(1, start=1)
    t.engine.load(t.folder)
    t.train(1, start=2)
    told = before_close(model) if before_close else None
    t.close()
    go_on(t, model)
    return {"state": state, "told": told or {}}


def go_on(t: Any, model: nn.Module) -> None:
    """A step of plain torch, on every rank with all samples."""
    optimizer = torch.optim.SGD(trial.all_parameters(model), lr=0.1)
    optimizer.zero_grad()
    features, targets = nets.batch(7, trial.SAMPLES)
    ((model(features) - targets) ** 2).mean().backward()
    optimizer.step()


# ---- what is overridden. `root` is a class of the model, `block` a class of its blocks.


def root(mixin: type) -> nn.Module:
    return nets.build(type("Net", (mixin, nets.Net), {}))


def block(mixin: type) -> nn.Module:
    made = type("Mlp", (mixin, nets.Mlp), {})
    model = nets.Net(0)
    model.blocks.extend(made() for _ in range(3))
    return nets.models.fill(model)


def leaf(mixin: type) -> nn.Module:
    """The first layer of each block and the model's last layer."""
    made = type("Linear", (mixin, nn.Linear), {})
    model = nets.Net()
    for one in model.blocks:
        one.up = made(nets.WIDTH, 2 * nets.WIDTH)
    model.leave = made(nets.WIDTH, 1)
    return nets.models.fill(model)


def overrides_in(
    group: Group,
    what: str,
    outcome: Outcome | None = None,
    sharded: Outcome | None = None,
    on: Callable[[type], nn.Module] = root,
    then: Change | None = None,
) -> Callable[[type], type]:
    """Adds a row for a mixin of the model's or its blocks' class."""
    where = {root: "the model's", block: "a block's", leaf: "a layer's"}[on]

    def add(mixin: type) -> type:
        add_row_in(group, f"{where} {what}", lambda: on(mixin), outcome, sharded, then)
        return mixin

    return add


def add_row_in(
    group: Group,
    name: str,
    build: Callable[[], nn.Module],
    outcome: Outcome | None = None,
    sharded: Outcome | None = None,
    then: Change | None = None,
) -> None:
    given = (outcome,) if outcome else ()
    group(name, *given, sharded=sharded, precision=("fp32",), accumulate=(1,))(
        lambda t: story(t, build(), then)
    )


add_row, overrides = functools.partial(add_row_in, rows), functools.partial(overrides_in, rows)


# ---- state_dict and load_state_dict


class ValueHead(nn.Module):
    """A language model's wrapper: both states go into one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = nets.Net(), nn.Linear(nets.WIDTH, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.pretrained_model.trunk(features)
        return self.pretrained_model.leave(hidden).squeeze(-1) + self.v_head(hidden).squeeze(-1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pretrained_model.state_dict(*args, **kwargs)
        for name, value in self.v_head.state_dict(*args, **kwargs).items():
            state[f"v_head.{name}"] = value
        return state

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        head = {k.removeprefix("v_head."): v for k, v in state.items() if k.startswith("v_head.")}
        self.v_head.load_state_dict(head)
        return self.pretrained_model.load_state_dict(
            {k: v for k, v in state.items() if not k.startswith("v_head.")}, strict
        )


add_row(
    "a value head, whose `state_dict` adds its keys to the wrapped model's",
    lambda: nets.build(ValueHead),
)


@overrides("`state_dict` without arguments")
class NoArguments:
    def state_dict(self) -> Any:
        return nn.Module.state_dict(self)


@overrides("`state_dict` that returns copies")
class Copies:
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v.clone() for k, v in super().state_dict(*args, **kwargs).items()}


@overrides("`state_dict` that converts: `v.half()`")
class Halves:
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((k, v.double().cpu()) for k, v in state.items())


@overrides("`state_dict` and `load_state_dict` that rename the keys")
class Renames:
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"model.{k}": v for k, v in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        return super().load_state_dict({k.removeprefix("model."): v for k, v in state.items()})


@overrides("`state_dict` that leaves out frozen weights")
class LeavesOut:
    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if k in trained}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        return super().load_state_dict(state, strict=False)


@overrides("`state_dict` that lists `named_parameters()` and does not call torch's")
class ByNames:
    def state_dict(self) -> Any:
        return {name: p.data * 1 for name, p in self.named_parameters()}


@overrides("`state_dict` that merges two weights")
class Merges:
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["enter"] = torch.cat([state.pop("enter.weight"), state.pop("enter.bias")[:, None]], 1)
        return state

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        both = state["enter"]
        own = {k: v for k, v in state.items() if k != "enter"}
        return super().load_state_dict(
            own | {"enter.weight": both[:, :-1], "enter.bias": both[:, -1]}
        )


@overrides("`state_dict` that adds a number, which `load_state_dict` reads")
class Counts:
    seen = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(features) * (1 + self.seen / 8)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["seen"] = self.seen
        return state

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        state = dict(state)
        self.seen = state.pop("seen")
        return super().load_state_dict(state, strict)


@overrides("`state_dict` that adds a tensor of its own", refused("running"))
class Running:
    def __init__(self) -> None:
        super().__init__()
        self.running = torch.zeros(2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.running = self.running + 1
        return super().forward(features) * (1 + self.running.mean() / 8)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["running"] = self.running
        return state

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        state = dict(state)
        self.running = state.pop("running")
        return super().load_state_dict(state, strict)


@overrides("`_save_to_state_dict` that adds a number", on=block)
class SavesMore:
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = self.calls

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.calls = state.pop(prefix + "calls")
        super()._load_from_state_dict(state, prefix, *others)


@overrides("`_save_to_state_dict` that transposes a weight", on=leaf)
class Transposes:
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.pop(prefix + "weight")
        destination[prefix + "kernel"] = weight.t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel").t()
        super()._load_from_state_dict(state, prefix, *others)


@overrides("`state_dict(destination, prefix, keep_vars)` that renames", on=block)
class BlockState:
    def state_dict(self, *, destination: Any, prefix: str, keep_vars: bool) -> Any:
        own = nn.Module.state_dict(self, keep_vars=keep_vars)
        destination.update({prefix + k: v * 1 for k, v in own.items()})
        return destination


def assigned_state() -> nn.Module:
    model = nets.build()
    inner = model.state_dict
    model.state_dict = lambda: {k: v.clone() for k, v in inner().items()}  # type: ignore[method-assign]
    return model


add_row("`model.state_dict = ...` on the instance", assigned_state)


# ---- walks over parameters, modules and buffers


@overrides("`parameters` that hides the first layer from the optimizer", refused("in no group"))
class HidesTrained:
    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (p for n, p in self.named_parameters() if not n.startswith("enter"))


@overrides("`parameters` that hides frozen weights")
class HidesFrozen:
    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (p for p in super().parameters(recurse) if p.requires_grad)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if p.requires_grad)


@overrides("`parameters` that returns a list")
class Listed:
    def parameters(self, recurse: bool = True) -> Any:
        return list(super().parameters(recurse))


@overrides("`parameters` that returns parameter groups")
class Grouped:
    def parameters(self, recurse: bool = True) -> Any:
        return iter([p for m in self.modules() for p in m._parameters.values() if p is not None])


@overrides("`named_parameters(prefix, recurse)`, without `remove_duplicate`")
class OldSignature:
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[Any]:
        return super().named_parameters(prefix, recurse)


@overrides("`named_parameters` that renames")
class RenamesNames:
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return ((f"net.{n}", p) for n, p in super().named_parameters(*args, **kwargs))


@overrides("`named_parameters` in another order")
class Reversed:
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return reversed(list(super().named_parameters(*args, **kwargs)))


@overrides("`named_modules` that hides the blocks")
class HidesModules:
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return (one for one in super().named_modules(*args, **kwargs) if "blocks" not in one[0])

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from (*self.enter.parameters(), *self.blocks.parameters(), *self.leave.parameters())


@overrides("`named_modules` without arguments")
class BareModules:
    def named_modules(self) -> Any:
        return list(nn.Module.named_modules(self))

    def parameters(self) -> Any:
        return [p for _, m in self.named_modules() for p in m._parameters.values()]

    def modules(self) -> Any:
        return [one for _, one in self.named_modules()]


@overrides("`modules` and `children` that return nothing")
class NoModules:
    def modules(self) -> Any:
        return []

    def children(self) -> Any:
        return []

    def named_children(self) -> Any:
        return []

    def train(self, mode: bool = True) -> Any:
        self.training = mode
        return self


@overrides("`parameters`, `named_parameters`, `children` that return nothing", on=block)
class BlockHides:
    def parameters(self, recurse: bool = True) -> Any:
        return iter(())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def children(self) -> Any:
        return iter(())


@overrides("`named_modules` that yields itself alone", on=block)
class BlockAlone:
    def modules(self) -> Any:
        return iter((self,))


@overrides("`named_parameters(recurse)` with another signature", on=leaf)
class LeafNames:
    def named_parameters(self, recurse: bool = True) -> Any:
        return iter((("w", self.weight),))

    def parameters(self) -> Any:
        return iter((self.weight,))


class WithStatistics(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + 0.1
        return super().forward(features + self.mean)


class NoBuffers(WithStatistics):
    def buffers(self, recurse: bool = True) -> Any:
        return []

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


add_row(
    "the model's `buffers` and `named_buffers` that return nothing", lambda: nets.build(NoBuffers)
)


@overrides("`get_submodule` and `get_parameter` that raise")
class NoPaths:
    def get_submodule(self, target: str) -> Any:
        raise KeyError(target)

    def get_parameter(self, target: str) -> Any:
        raise KeyError(target)


# ---- methods assigned on the instance


def assigned_walks() -> nn.Module:
    model: Any = nets.build()
    weights = list(model.parameters())
    model.parameters = lambda recurse=True: weights
    model.named_parameters = lambda: [(str(i), p) for i, p in enumerate(weights)]
    model.modules = model.children = model.buffers = list
    model.named_modules = lambda: {"": model}.items()
    model.blocks.named_modules = model.blocks.parameters = model.blocks.children = list
    return model


add_row(
    "`parameters`, `named_parameters`, `modules` and others assigned on instances", assigned_walks
)


def assigned_load() -> nn.Module:
    model: Any = nets.build()
    inner = model.load_state_dict
    model.load_state_dict = lambda state: inner({k: v * 1 for k, v in state.items()})
    return model


add_row("`model.load_state_dict = ...` on the instance", assigned_load)
