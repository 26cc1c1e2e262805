"""What people do to an optimizer."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from idioms import nets
from idioms.table import IN_MEMORY, Group, either, refused
from idioms.trial import adamw

rows = Group("Optimizers")
ONE = (1,)


# ---- stepping it


@rows("`optimizer.step()`", refused("engine.step()"), accumulate=ONE)
def direct_step(t: Any) -> None:
    t.start()
    t.train(1)
    t.engine.backward(t.loss(1))
    t.optimizer.step()


@rows("`optimizer.step(closure)`", refused("engine.step()"), accumulate=ONE)
def closure(t: Any) -> None:
    t.start()

    def compute() -> Any:
        t.optimizer.zero_grad()
        loss = t.loss(0)
        t.engine.backward(loss)
        return loss

    t.optimizer.step(compute)


@rows("`optimizer.step()` and `engine.step()` both", refused("engine.step()"), accumulate=ONE)
def both_steps(t: Any) -> None:
    t.start()
    t.engine.backward(t.loss(0))
    t.engine.step()
    t.optimizer.step()


@rows("a `step` wrapped by hand: `optimizer.step = timed(optimizer.step)`", either())
def wrapped_step(t: Any) -> dict[str, Any]:
    seen: list[int] = []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = adamw(params)
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return original(*args, **kwargs)

        optimizer.step = step
        return optimizer

    t.start(optimizer=make)
    t.train(2)
    return {"calls": len(seen)}


@rows("step hooks of the optimizer, which count")
def step_hooks(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    t.optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    t.optimizer.register_step_post_hook(lambda *_: seen.append(2))
    t.train(2)
    return {"seen": seen}


@rows("step hooks of an optimizer that steps on shards", tier=IN_MEMORY)
def step_hooks_on_shards(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start(optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-2))
    t.optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    t.optimizer.register_step_post_hook(lambda *_: seen.append(2))
    t.train(2)
    return {"seen": seen}


@rows("step hooks put on before `initialize`, one removed later")
def early_step_hooks(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    model = nets.build()
    optimizer = adamw(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(2))
    t.start(model, optimizer)
    t.train(1)
    handle.remove()
    t.train(1, start=1)
    return {"seen": seen}


@rows("a global step hook: `register_optimizer_step_post_hook`")
def global_step_hook(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        t.train(2)
    finally:
        handle.remove()
    return {"seen": seen}


@rows("a step pre-hook that warms the learning rate up")
def pre_hook_sets_lr(t: Any) -> None:
    def warm(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 2

    t.start()
    t.optimizer.register_step_pre_hook(warm)
    t.train(3)


@rows("a step post-hook that clamps the weights", sharded=refused("weight"), alone=either())
def post_hook_clamps(t: Any) -> None:
    def clamp(*_: Any) -> None:
        with torch.no_grad():
            t.model.blocks[0].up.weight.clamp_(-0.1, 0.1)

    t.start()
    t.optimizer.register_step_post_hook(clamp)
    t.train(3)


# ---- its state


@rows("`optimizer.state_dict()`", refused("state"))
def state_dict(t: Any) -> None:
    t.start()
    t.train(1)
    t.optimizer.state_dict()


@rows("`optimizer.load_state_dict(...)`", refused("state"))
def load_state_dict(t: Any) -> None:
    saved = adamw(nets.build().parameters()).state_dict()
    t.start()
    t.train(1)
    t.optimizer.load_state_dict(saved)
    t.train(1)


@rows("a state loaded before `initialize`", refused("steps already"))
def load_state_before(t: Any) -> None:
    model = nets.build()
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    t.start(model, optimizer)
    t.train(1)


@rows("`optimizer.state[p]` read", refused("state"))
def state_read(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    return {"average": t.optimizer.state[t.model.enter.weight]["exp_avg"]}


@rows("a loop over `optimizer.state`", refused("state"))
def state_walked(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    return {"sizes": [len(state) for state in t.optimizer.state.values()]}


@rows("moments reset: `optimizer.state.clear()`", refused("state"))
def state_cleared(t: Any) -> None:
    t.start()
    t.train(1)
    t.optimizer.state.clear()
    t.train(1)


@rows("moments reset: `optimizer.state = defaultdict(dict)`", refused("state"))
def state_replaced(t: Any) -> None:
    t.start()
    t.train(1)
    t.optimizer.state = defaultdict(dict)
    t.train(1)


@rows("one parameter's moments reset: `del optimizer.state[p]`", refused("state"))
def state_deleted(t: Any) -> None:
    t.start()
    t.train(1)
    del t.optimizer.state[t.model.leave.weight]
    t.train(1)


@rows("`copy.deepcopy(optimizer)`", refused("state"), sharded=refused(), alone=refused())
def copied(t: Any) -> None:
    t.start()
    t.train(1)
    copy.deepcopy(t.optimizer)


@rows("`repr(optimizer)`")
def told(t: Any) -> dict[str, Any]:
    t.start()
    return {"named": "AdamW" in repr(t.optimizer), "lr": "lr: 0.02" in repr(t.optimizer)}


# ---- its groups


def group_edits(t: Any, make: Any = adamw, **edits: Any) -> None:
    t.start(optimizer=make)
    t.train(2)
    for group in t.optimizer.param_groups:
        group.update(edits)
    t.train(2, start=2)


@rows('`group["lr"] = ...`')
def set_lr(t: Any) -> None:
    group_edits(t, lr=3e-2)


@rows('`group["lr"] = 0`')
def zero_lr(t: Any) -> None:
    group_edits(t, lr=0.0)


@rows('`group["weight_decay"] = ...`')
def set_decay(t: Any) -> None:
    group_edits(t, weight_decay=1.0)


@rows('`group["betas"] = ...`')
def set_betas(t: Any) -> None:
    group_edits(t, betas=(0.5, 0.9))


@rows('`group["eps"] = ...`')
def set_eps(t: Any) -> None:
    group_edits(t, eps=1.0)


@rows('`group["momentum"] = ...` of an SGD that has momentum')
def set_momentum(t: Any) -> None:
    group_edits(t, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), momentum=0.5)


@rows('`group["lr"]` of an optimizer that steps on shards', tier=IN_MEMORY)
def set_lr_on_shards(t: Any) -> None:
    group_edits(t, lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-2), lr=5e-3)


@rows('`group["lr"]` as a tensor')
def tensor_lr(t: Any) -> None:
    group_edits(t, lr=torch.tensor(3e-2))


@rows("`lr` as a tensor that is edited in place")
def tensor_lr_edited(t: Any) -> None:
    rate = torch.tensor(1e-2)
    t.start(optimizer=lambda params: torch.optim.AdamW(params, lr=rate, eps=1e-2))
    t.train(2)
    rate.mul_(3)
    t.train(2, start=2)


@rows('`group["maximize"] = True` later', refused("maximize"))
def set_maximize(t: Any) -> None:
    group_edits(t, maximize=True)


@rows('`group["amsgrad"] = True` later', refused("amsgrad"))
def set_amsgrad(t: Any) -> None:
    def make(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)

    t.start(optimizer=make)
    t.train(0 if t.plain else 2)
    t.optimizer.param_groups[0]["amsgrad"] = True
    t.train(2, start=2)


@rows("an unknown key in a group")
def unknown_key(t: Any) -> None:
    group_edits(t, name="body", depth=3)


@rows("`maximize=True` from the start", tier=IN_MEMORY)
def maximize(t: Any) -> None:
    t.start(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-2, maximize=True))
    t.train(3)


@rows("`amsgrad=True` from the start", tier=IN_MEMORY)
def amsgrad(t: Any) -> None:
    t.start(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, amsgrad=True))
    t.train(3)


@rows("`fused=True`")
def fused(t: Any) -> None:
    t.start(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, fused=True))
    t.train(3)


@rows("`foreach=True`")
def foreach(t: Any) -> None:
    t.start(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, foreach=True))
    t.train(3)


@rows("`Adam(decoupled_weight_decay=True)`")
def decoupled(t: Any) -> None:
    t.start(
        optimizer=lambda p: torch.optim.Adam(
            p, lr=1e-2, eps=1e-2, weight_decay=1.0, decoupled_weight_decay=True
        )
    )
    t.train(3)


@rows("no weight decay for norms and biases, by `p.ndim`")
def by_dims(t: Any) -> None:
    model = nets.build()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 1.0}, {"params": others, "weight_decay": 0.0}]
    t.start(model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-2))
    t.train(3)


@rows("layer-wise learning rates, with one group per parameter")
def layer_wise(t: Any) -> None:
    model = nets.build()
    groups = [
        {"params": [p], "lr": 1e-2 * 0.9**index} for index, p in enumerate(model.parameters())
    ]
    t.start(model, torch.optim.AdamW(groups, eps=1e-2))
    t.train(3)


@rows("named parameters: `AdamW(model.named_parameters())`")
def named(t: Any) -> None:
    model = nets.build()
    t.start(model, torch.optim.AdamW(model.named_parameters(), lr=1e-2, eps=1e-2))
    t.train(3)


@rows("a `functools.partial` of the class")
def partial(t: Any) -> None:
    t.start(optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-2))
    t.train(2)


@rows("`add_param_group` with parameters taken from another group")
def split_group(t: Any) -> None:
    t.start()
    t.train(1)
    group = t.optimizer.param_groups[0]
    kept, moved = group["params"][:4], group["params"][4:]
    group["params"] = kept
    t.optimizer.add_param_group({"params": moved, "lr": 3e-2})
    t.train(2, start=1)


@rows(
    "`add_param_group` with a parameter that was frozen at `initialize`",
    refused("blocks.1", "frozen at initialize"),
)
def add_frozen(t: Any) -> None:
    model = nets.build()
    model.blocks[1].requires_grad_(False)
    t.start(model)
    t.train(1)
    model.blocks[1].requires_grad_(True)
    t.optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    t.train(2, start=1)


@rows("`add_param_group` with a parameter that is not the model's", refused("not"))
def add_foreign(t: Any) -> None:
    t.start()
    t.train(1)
    scale = nn.Parameter(torch.ones(()))
    t.optimizer.add_param_group({"params": [scale]})
    for step in t.steps(2, start=1):
        t.engine.backward(t.loss(step) * scale)
        t.engine.step()


@rows("an optimizer with a parameter that is not the model's (a temperature)", refused("not"))
def foreign(t: Any) -> None:
    model, scale = nets.build(), nn.Parameter(torch.ones(()))
    t.start(model, torch.optim.AdamW([*model.parameters(), scale], lr=1e-2, eps=1e-2))
    for step in t.steps(2):
        t.engine.backward(t.loss(step) * scale)
        t.engine.step()


@rows("an optimizer without one of the parameters that train", refused("leave.bias", "in no group"))
def missing(t: Any) -> None:
    model = nets.build()
    t.start(model, adamw([p for n, p in model.named_parameters() if n != "leave.bias"]))
    t.train(1)


@rows("an optimizer without the parameters that are frozen")
def without_frozen(t: Any) -> None:
    model = nets.build()
    model.enter.requires_grad_(False)
    t.start(model, adamw([p for p in model.parameters() if p.requires_grad]))
    t.train(3)


@rows("an optimizer with the parameters that are frozen")
def with_frozen(t: Any) -> None:
    model = nets.build()
    model.enter.requires_grad_(False)
    t.start(model, adamw(model.parameters()))
    t.train(3)


@rows("two optimizers for one model", refused("in no group"))
def two_optimizers(t: Any) -> None:
    model = nets.build()
    other = torch.optim.SGD(model.leave.parameters(), lr=0.01)
    t.start(model, adamw([*model.enter.parameters(), *model.blocks.parameters()]))
    t.engine.backward(t.loss(0))
    t.engine.step(force=True)
    other.step()


@rows("a parameter taken out of its group later", either())
def removed_parameter(t: Any) -> None:
    t.start()
    t.train(1)
    params = t.optimizer.param_groups[0]["params"]
    t.optimizer.param_groups[0]["params"] = [p for p in params if p is not t.model.leave.weight]
    t.train(2, start=1)


@rows("`engine.optimizer = another`", refused("optimizer"), accumulate=ONE)
def replaced(t: Any) -> None:
    t.start()
    t.train(1)
    t.engine.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.5)
    t.train(1, start=1)


@rows('parameters frozen through `param_groups[i]["params"]`')
def frozen_by_group(t: Any) -> None:
    t.start()
    for step in range(3):
        for p in t.optimizer.param_groups[0]["params"][:2]:
            p.requires_grad_(step == 0)
        t.engine.backward(t.loss(step))
        t.engine.step(force=True)


@rows('`len(group["params"])` and their sizes, for a log')
def counted(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    params = t.optimizer.param_groups[0]["params"]
    return {"count": len(params), "numel": sum(p.numel() for p in params)}


# ---- kinds


@rows("`LBFGS`", refused("elementwise"), accumulate=ONE)
def lbfgs(t: Any) -> None:
    t.start(optimizer=torch.optim.LBFGS)


@rows("`Adafactor`", refused("elementwise"))
def adafactor(t: Any) -> None:
    t.start(optimizer=torch.optim.Adafactor)
    t.train(1)


class SignSgd(torch.optim.Optimizer):
    """Elementwise."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * torch.tanh(10 * p.grad))


class ClippedSgd(SignSgd):
    """With the norm of all gradients inside."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(0.01 * p.grad / (total + 1e-6))


class Lookahead(SignSgd):
    """Slow weights in its state, which are taken over every second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(slow=p.clone(), seen=0)
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
                state["seen"] += 1
                if state["seen"] % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


@rows("an elementwise optimizer of your own", tier=IN_MEMORY)
def own(t: Any) -> None:
    t.start(optimizer=SignSgd)
    t.train(3)


@rows("Lookahead as an optimizer of your own", tier=IN_MEMORY)
def lookahead(t: Any) -> None:
    t.start(optimizer=functools.partial(Lookahead, lr=1e-2))
    t.train(4)


@rows("an optimizer of your own with the norm of all gradients inside", refused("elementwise"))
def global_norm(t: Any) -> None:
    t.start(optimizer=ClippedSgd)
    t.train(1)


@rows("a wrapper of an optimizer that is not an `Optimizer`", refused("optimizer"), accumulate=ONE)
def wrapper(t: Any) -> None:
    class Wrapper:
        def __init__(self, params: Any):
            self.inner = adamw(params)
            self.param_groups = self.inner.param_groups

        def step(self) -> None:
            self.inner.step()

    t.start(optimizer=Wrapper)
    t.train(1)


@rows("a model whose parameters are all frozen", either())
def all_frozen(t: Any) -> None:
    model = nets.build().requires_grad_(False)
    params = list(model.parameters())
    t.start(model, adamw(params))
    with torch.no_grad():
        t.loss(0)
