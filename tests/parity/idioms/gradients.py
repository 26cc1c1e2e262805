"""What people do to gradients between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from idioms.table import Group, either, refused

rows = Group("Gradients")
ONE = (1,)
FP32 = ("fp32",)
NAMED = "enter.weight"


def after_backward(t: Any, touch: Callable[[], Any]) -> None:
    """Two steps; the second one's gradients are touched."""
    t.start()
    t.train(1)
    for step in t.steps(1, start=1):
        t.engine.backward(t.loss(step))
    touch()
    t.engine.step(force=True)


def first(t: Any) -> nn.Parameter:
    return t.model.enter.weight


# ---- values: refused, for a gradient is sharded or on its way


@rows("`clip_grad_norm_` before the step", refused("clip"))
def clip_norm(t: Any) -> None:
    after_backward(t, lambda: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1))


@rows("`clip_grad_value_` before the step", refused("set_grads"))
def clip_value(t: Any) -> None:
    after_backward(t, lambda: nn.utils.clip_grad_value_(t.model.parameters(), 0.1))


@rows("`nn.utils.get_total_norm` of `.grad`", refused("full_grads"))
def total_norm(t: Any) -> None:
    def norm() -> None:
        nn.utils.get_total_norm([p.grad for p in t.model.parameters()])

    after_backward(t, norm)


@rows("noise: `p.grad.add_(...)`", refused(NAMED, "set_grads"))
def noise(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.add_(0.1))


@rows("`p.grad.mul_(...)`", refused(NAMED, "set_grads"))
def scaled(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.mul_(0.5))


@rows("`p.grad.data.mul_(...)`", refused("set_grads"))
def scaled_data(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.data.mul_(0.5))


@rows("`p.grad /= k`", refused(NAMED, "set_grads"))
def divided(t: Any) -> None:
    def divide() -> None:
        first(t).grad /= 2

    after_backward(t, divide)


@rows("`p.grad[0] = 0`", refused(NAMED, "set_grads"))
def item_set(t: Any) -> None:
    def assign() -> None:
        first(t).grad[0] = 0

    after_backward(t, assign)


@rows("`torch._foreach_mul_` on all of `.grad`", refused("set_grads"))
def foreach(t: Any) -> None:
    after_backward(t, lambda: torch._foreach_mul_([p.grad for p in t.model.parameters()], 0.5))


@rows("`p.grad.norm()` for a log", refused(NAMED, "full_grads"))
def norm_read(t: Any) -> None:
    after_backward(t, lambda: float(first(t).grad.norm()))


@rows("`p.grad.clone()`", refused("full_grads"))
def cloned(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.clone())


@rows("`torch.isfinite(p.grad).all()`", refused("full_grads"))
def finite(t: Any) -> None:
    after_backward(t, lambda: bool(torch.isfinite(first(t).grad).all()))


@rows("`p.grad.numpy()`", refused("full_grads"), precision=FP32)
def as_numpy(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.numpy().sum())


@rows("`p.grad.tolist()`", refused("full_grads"))
def as_list(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.tolist())


@rows("`p.grad.flatten()[0].item()`", refused("full_grads"))
def one_item(t: Any) -> None:
    after_backward(t, lambda: first(t).grad.flatten()[0].item())


@rows("`torch.cat` of all flattened gradients", refused("full_grads"))
def joined(t: Any) -> None:
    after_backward(t, lambda: torch.cat([p.grad.flatten() for p in t.model.parameters()]))


@rows("`dist.all_reduce(p.grad)` by hand", refused("full_grads"), world=(2,))
def reduced_by_hand(t: Any) -> None:
    after_backward(t, lambda: t.plain or dist.all_reduce(first(t).grad))


@rows("`p.grad = tensor`", refused("set_grads"))
def assigned(t: Any) -> None:
    def assign() -> None:
        first(t).grad = torch.ones_like(first(t))

    after_backward(t, assign)


@rows("`p.grad = tensor` before the backward", refused("set_grads"), accumulate=ONE)
def assigned_before(t: Any) -> None:
    t.start()
    for step in range(2):
        first(t).grad = torch.ones_like(first(t))
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("gradient surgery: `p.grad` is put together from two losses", refused("set_grads"))
def surgery(t: Any) -> None:
    def project() -> None:
        for p in t.model.parameters():
            p.grad = p.grad - p.grad.mean()

    after_backward(t, project)


@rows("gradients from a file: `p.grad = saved` and a step without a backward", refused("set_grads"))
def from_a_file(t: Any) -> None:
    t.start()
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 0.1)
    t.engine.step(force=True)


@rows("`scaler.unscale_(optimizer)` of a `GradScaler`", refused("full_grads"), accumulate=ONE)
def unscale(t: Any) -> None:
    t.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t.engine.backward(scaler.scale(t.loss(0)))
    scaler.unscale_(t.optimizer)
    t.engine.step()


@rows("`scaler.step(optimizer)` of a `GradScaler`", refused("engine"), accumulate=ONE)
def scaler_step(t: Any) -> None:
    t.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t.engine.backward(scaler.scale(t.loss(0)))
    scaler.step(t.optimizer)
    scaler.update()


@rows(
    "`GradScaler(enabled=False)`, whose step is the optimizer's",
    refused("engine.step()"),
    accumulate=ONE,
)
def disabled_scaler(t: Any) -> None:
    t.start()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    t.engine.backward(scaler.scale(t.loss(0)))
    scaler.step(t.optimizer)


# ---- presence: as in torch


@rows("`p.grad is None` before the backward, after it and after the step")
def presence(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in t.steps(2):
        loss = t.loss(step)
        seen.append([p.grad is None for p in t.model.parameters()])
        t.engine.backward(loss)
        seen.append([p.grad is None for p in t.model.parameters()])
        if t.engine.step():
            seen.append([p.grad is None for p in t.model.parameters()])
    return {"seen": seen}


@rows("shape, dtype, device, layout and numel of `p.grad`")
def described(t: Any) -> dict[str, Any]:
    t.start()
    t.engine.backward(t.loss(0))
    seen = [
        [
            *p.grad.shape,
            p.grad.dtype == p.dtype,
            p.grad.device == p.device,
            p.grad.is_sparse,
            p.grad.layout == torch.strided,
            p.grad.numel(),
            p.grad.ndim,
            p.grad.requires_grad,
        ]
        for p in t.model.parameters()
    ]
    t.engine.step(force=True)
    return {"seen": seen}


@rows("`p.grad is None` of a parameter that the loss does not reach")
def unreached(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    t.model.blocks[2].requires_grad_(False)
    t.engine.backward(t.loss(5))
    seen = [p.grad is None for p in t.model.parameters()]
    t.engine.step(force=True)
    return {"seen": seen}


@rows("`p.grad = None` drops one parameter's gradient", accumulate=ONE)
def dropped_one(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in range(3):
        t.engine.backward(t.loss(step))
        if step > 0:
            t.model.blocks[1].up.weight.grad = None
        seen.append(t.model.blocks[1].up.weight.grad is None)
        t.engine.step()
    return {"seen": seen}


@rows("`del p.grad`", accumulate=ONE)
def deleted(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(step))
        if step == 1:
            del t.model.leave.weight.grad
        t.engine.step()


def skipping(t: Any, drop: Callable[[], Any]) -> None:
    """The second batch's gradients are dropped."""
    t.start()
    for step in range(4):
        t.engine.backward(t.loss(step))
        if step == 1:
            drop()
            continue
        t.engine.step()


@rows("`optimizer.zero_grad()` between backward and step", accumulate=ONE)
def optimizer_zero(t: Any) -> None:
    skipping(t, lambda: t.optimizer.zero_grad())


@rows("`model.zero_grad()` between backward and step", accumulate=ONE)
def model_zero(t: Any) -> None:
    skipping(t, lambda: t.model.zero_grad())


@rows("`engine.zero_grad()` between backward and step", accumulate=ONE)
def engine_zero(t: Any) -> None:
    skipping(t, lambda: t.engine.zero_grad())


@rows("`module.zero_grad()` of a part between backward and step", accumulate=ONE)
def part_zero(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(step))
        t.model.blocks[1].zero_grad()
        t.engine.step()


@rows(
    "`zero_grad(set_to_none=False)` between backward and step",
    either(),
    accumulate=ONE,
)
def zero_in_place(t: Any) -> None:
    skipping(t, lambda: t.optimizer.zero_grad(set_to_none=False))


@rows("`optimizer.zero_grad()` at the start of the loop", accumulate=ONE)
def zero_first(t: Any) -> None:
    t.start()
    for step in range(3):
        t.optimizer.zero_grad()
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("`zero_grad(set_to_none=False)` at the start of the loop", accumulate=ONE)
def zero_first_in_place(t: Any) -> None:
    t.start()
    for step in range(3):
        t.optimizer.zero_grad(set_to_none=False)
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("`zero_grad()` after the step", accumulate=ONE)
def zero_last(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(step))
        t.engine.step()
        t.engine.zero_grad()


@rows("`zero_grad()` between forward and backward")
def zero_between(t: Any) -> None:
    t.start()
    t.train(1)
    for step in range(3):
        loss = t.loss(step)
        if step == 0:
            t.engine.zero_grad()
        t.engine.backward(loss)
        t.engine.step(force=True)


@rows("a batch whose loss is not finite is skipped before the backward", accumulate=ONE)
def skip_infinite(t: Any) -> None:
    t.start()
    for step in range(4):
        loss = t.loss(step)
        if step == 1:
            loss = loss * torch.inf
        if torch.isfinite(loss):
            t.engine.backward(loss)
            t.engine.step()


@rows("a gradient that is not finite goes into a step", refused("finite"), accumulate=ONE)
def not_finite(t: Any) -> None:
    t.start()
    t.engine.backward(t.loss(0) * torch.inf)
    t.engine.step()


@rows("a gradient that is not finite is dropped with `zero_grad()`", accumulate=ONE)
def drop_infinite(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(step) * (torch.nan if step == 1 else 1.0))
        if step == 1:
            t.engine.zero_grad()
        else:
            t.engine.step()


# ---- through the engine's calls


def through_calls(t: Any, edit: Callable[[torch.Tensor], torch.Tensor], factor: float = 1) -> Any:
    t.start()
    norms = []
    for step in range(3):
        t.engine.backward(t.loss(step) * (factor if step == 1 else 1))
        gradients = t.engine.full_grads()
        norms.append([float(g.nan_to_num().norm()) for g in gradients.values()])
        t.engine.set_grads({name: edit(g) for name, g in gradients.items()})
        t.engine.step()
    return {"norms": norms}


@rows("`set_grads` cures a NaN", accumulate=ONE)
def cured(t: Any) -> None:
    through_calls(t, torch.nan_to_num, factor=torch.nan)


@rows("clipping by value with `full_grads` and `set_grads`", precision=FP32, accumulate=ONE)
def clipped_by_calls(t: Any) -> dict[str, Any]:
    return through_calls(t, lambda g: g.clamp(-0.1, 0.1))


@rows("centred gradients with `full_grads` and `set_grads`", accumulate=ONE)
def centred_by_calls(t: Any) -> dict[str, Any]:
    return through_calls(t, lambda g: g - g.mean())


@rows("noise with `full_grads` and `set_grads`", accumulate=ONE)
def noise_by_calls(t: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    return through_calls(t, lambda g: g + 0.1 * torch.randn(g.shape))
