"""Models that override how they are called, their attributes, modes and hooks. See overrides.py."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn

from idioms import nets, trial
from idioms.overrides import add_row_in, block, leaf, overrides_in, root
from idioms.table import Group, either

rows = Group("Overrides of `forward`, `__call__`, attributes, `train` and the like")
add_row, overrides = functools.partial(add_row_in, rows), functools.partial(overrides_in, rows)

# ---- calls


def assigned_forward() -> nn.Module:
    model = nets.build()

    def forward(self: Any, features: torch.Tensor) -> torch.Tensor:
        return self.leave(self.trunk(features)).squeeze(-1) * 2

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return model


add_row("`model.forward = ...` on the instance", assigned_forward)


def assigned_block() -> nn.Module:
    model = nets.build()
    for one in model.blocks:
        inner = one.forward
        one.forward = lambda x, inner=inner: inner(x) * 2  # type: ignore[method-assign]
    return model


add_row("`block.forward = ...` on the instance", assigned_block)


def add_to_forward(model: Any) -> dict[str, Any]:
    inner = model.forward
    model.forward = lambda x: inner(x) * 2
    features, _ = nets.batch(1, trial.SAMPLES)
    with torch.no_grad():
        return {"twice": model(features)}


add_row(
    "`model.forward = wrapped` while the engine is open, kept by `close()`",
    nets.build,
    then=add_to_forward,
)


def new_forward(model: Any) -> dict[str, Any]:
    for one in model.blocks:
        one.forward = types.MethodType(lambda self, x: nets.Mlp.forward(self, x) * 2, one)
    features, _ = nets.batch(1, trial.SAMPLES)
    with torch.no_grad():
        return {"twice": model(features)}


add_row(
    "`block.forward = ...` while the engine is open, kept by `close()`",
    nets.build,
    then=new_forward,
)


@overrides("`__call__` that scales what `super().__call__` returns")
class Scales:
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


@overrides("`__call__` that scales what `super().__call__` returns", on=block)
class BlockScales:
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


@overrides("`__call__` that calls `forward` without hooks")
class Bypasses:
    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@overrides("`__call__` that calls `forward` without hooks", on=block, sharded=either())
class BlockBypasses:
    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@overrides("`__call__` that reads a weight after `super().__call__`")
class Reads:
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * self.leave.bias.exp()


@overrides("`__call__` that reads a weight after `super().__call__`", on=block, sharded=either())
class BlockReads:
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * self.down.bias.exp()


@overrides("`__call__` that calls `forward` without hooks", on=leaf)
class LeafBypasses:
    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


# ---- attributes


class Delegates(nn.Module):
    """What it lacks is the inner model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Generates()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features)


class Generates(nets.Net):
    def generate(self, features: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            features = features + self(features)[:, None]
        return features


def generate_and_copy(model: Any) -> dict[str, Any]:
    import penstock.front.engine as front  # noqa: PLC0415

    features, _ = nets.batch(1, trial.SAMPLES)
    engine = front.engine_of(next(model.parameters()))
    with torch.no_grad():
        made = model.generate(features, 2)
    with engine.gathered() if engine is not None else torch.no_grad():
        other = copy.deepcopy(model)
    with torch.no_grad():
        return {"made": made, "of copy": other.generate(features, 2)}


add_row(
    "a wrapper whose `__getattr__` delegates to the inner model",
    lambda: nets.build(Delegates),
    then=generate_and_copy,
)


@overrides("`__getattr__` that returns None for what is missing")
class Lenient:
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


@overrides("`__getattr__` that returns None for what is missing", on=block)
class BlockLenient:
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return None


@overrides("`__setattr__` that raises once the model is built")
class Frozen:
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["built"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("built") and name != "training":
            raise TypeError(f"{name} is fixed")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{name} is fixed")


@overrides("`__setattr__` that raises once it is built", on=block)
class BlockFrozen(Frozen):
    pass


def copied(model: Any) -> dict[str, Any]:
    import penstock.front.engine as front  # noqa: PLC0415

    engine = front.engine_of(model.enter.weight)
    with engine.gathered() if engine is not None else torch.no_grad():
        other = copy.deepcopy(model)
    features, targets = nets.batch(1, trial.SAMPLES)
    ((other(features) - targets) ** 2).mean().backward()
    return {"grad": other.enter.weight.grad}


@overrides("`__deepcopy__` that builds a new model and loads it", then=copied)
class Rebuilds:
    def __deepcopy__(self, memo: Any) -> Any:
        other = type(self)()
        other.load_state_dict(self.state_dict())
        return other


@overrides("`__getstate__` that leaves out a cache", then=copied)
class Lean:
    def __getstate__(self) -> Any:
        return {k: v for k, v in self.__dict__.items() if k != "cache"}


# ---- modes, conversions, gradients, hooks


def in_eval(model: Any) -> dict[str, Any]:
    features, _ = nets.batch(1, trial.SAMPLES)
    model.eval()
    with torch.no_grad():
        return {"evaluated": model(features)}


@overrides("`train` that returns nothing and keeps a block in eval mode", then=in_eval)
class KeepsEval:
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.blocks[0].training = False

    def eval(self) -> Any:
        super().eval()
        return self


@overrides("`eval` and `train` that switch something of its own", then=in_eval)
class Switches:
    factor = 1.0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) * self.factor

    def eval(self) -> Any:
        self.factor = 2.0
        return super().eval()


def evaluated_by_engine(t: Any) -> dict[str, Any]:
    t.start(root(Switches))
    t.train(1)
    features, _ = nets.batch(1, trial.SAMPLES)
    t.engine.eval()
    with torch.no_grad():
        numbers = t.engine(features)
    t.engine.train()
    t.train(1, start=1)
    return {"evaluated": numbers}


rows("`engine.eval()` of a model that overrides `eval`")(evaluated_by_engine)


@overrides("`to`, `cpu`, `float` that return nothing", then=lambda model: model.to("cpu"))
class Stays:
    def to(self, *_: Any, **__: Any) -> None: ...

    def cpu(self) -> None: ...

    def float(self) -> None: ...


@overrides("`_apply` that counts", then=lambda model: {"n": model.float().count})
class Applies:
    count = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.count += 1
        return super()._apply(fn, recurse)


def zeroed(model: Any) -> None:
    model.zero_grad()


@overrides("`zero_grad` that does nothing", then=zeroed)
class KeepsGradients:
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@overrides("`requires_grad_` that leaves the head as it is", then=lambda m: m.requires_grad_(False))
class KeepsHead:
    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.enter.requires_grad_(requires_grad)


@overrides("`register_forward_hook(hook)` and `register_forward_pre_hook(hook)`")
class NarrowHooks:
    def register_forward_hook(self, hook: Any) -> Any:
        raise TypeError("no hooks on this model")

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook


@overrides("`register_forward_hook(hook)` and `register_forward_pre_hook(hook)`", on=block)
class BlockNarrowHooks(NarrowHooks):
    pass


@overrides("`apply` that raises")
class NoApply:
    def apply(self, fn: Any) -> Any:
        raise TypeError("no apply")


@overrides("`__len__` that returns 0", on=block)
class Empty:
    def __len__(self) -> int:
        return 0


@overrides("`__len__` that returns 0")
class RootEmpty(Empty):
    pass


@overrides("`__repr__` that raises")
class NoText:
    def __repr__(self) -> str:
        raise TypeError("no text")


@overrides("`__iter__` and `__contains__` of its blocks")
class Iterates:
    def __iter__(self) -> Any:
        return iter(self.blocks)

    def __contains__(self, one: Any) -> bool:
        return one == 3


@overrides("`_get_name` and `extra_repr`", on=block)
class Named:
    def _get_name(self) -> str:
        return "Other"

    def extra_repr(self) -> str:
        return "x" * 9


def stays(_mode: bool = True) -> None:
    """Replaces `train`, so that a frozen part stays in eval mode."""


def frozen_part() -> nn.Module:
    model: Any = nets.build()
    model.enter.requires_grad_(False)
    model.blocks[0].eval()
    model.blocks[0].train = stays
    return model


add_row("`block.train = disabled` on the instance", frozen_part, then=in_eval)


def assigned_conversions() -> nn.Module:
    model: Any = nets.build()
    model.to = model.zero_grad = model.requires_grad_ = model.apply = model._apply = stays
    model.register_forward_hook = model.register_forward_pre_hook = stays
    model.blocks[1].register_forward_hook = model.blocks[1].register_forward_pre_hook = stays
    return model


add_row("`to`, `zero_grad`, `register_forward_hook` and others assigned", assigned_conversions)
