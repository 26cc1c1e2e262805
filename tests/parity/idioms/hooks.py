"""Hooks of tensors, of modules and of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from idioms import nets
from idioms.table import Group, either, raises, refused

rows = Group("Hooks")
ONE = (1,)
FP32 = ("fp32",)


# ---- of parameters


@rows("`p.register_hook` that scales the gradient, put on before `initialize`")
def scale_before(t: Any) -> None:
    model = nets.build()
    model.enter.weight.register_hook(lambda gradient: gradient * 0.5)
    t.start(model)
    t.train(3)


@rows("`p.register_hook` that scales the gradient, put on after `initialize`")
def scale_after(t: Any) -> None:
    t.start()
    t.model.enter.weight.register_hook(lambda gradient: gradient * 0.5)
    t.train(3)


@rows("`p.register_hook` that clamps the gradient", world=ONE, precision=FP32)
def clamp_hook(t: Any) -> None:
    t.start()
    for p in t.model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    t.train(3)


@rows("`p.register_hook` that masks rows of an embedding's or layer's gradient")
def mask_hook(t: Any) -> None:
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])[:, None]
    t.start()
    t.model.enter.weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
    t.train(3)


@rows("`p.register_hook` that logs the gradient's norm", world=ONE)
def log_hook(t: Any) -> dict[str, Any]:
    seen: list[float] = []
    t.start()
    t.model.blocks[1].up.weight.register_hook(lambda g: seen.append(float(g.float().norm())))
    t.train(3)
    return {"seen": seen}


@rows("`p.register_hook`, removed again")
def removed_hook(t: Any) -> None:
    t.start()
    handle = t.model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 0)
    t.train(1)
    handle.remove()
    t.train(2, start=1)


@rows("`p.register_hook` on a parameter that is frozen now and trains later")
def hook_of_frozen(t: Any) -> None:
    t.start()
    t.model.leave.weight.register_hook(lambda gradient: gradient * 2)
    for step in range(3):
        t.model.leave.requires_grad_(step != 1)
        t.engine.backward(t.loss(step))
        t.engine.step(force=True)


@rows("`register_post_accumulate_grad_hook` that counts")
def count_accumulated(t: Any) -> dict[str, Any]:
    seen: list[bool] = []
    t.start()
    for p in t.model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad is not None))
    t.train(2)
    return {"seen": seen}


@rows("`register_post_accumulate_grad_hook` that reads `.grad`", world=ONE, accumulate=ONE)
def read_accumulated(t: Any) -> dict[str, Any]:
    seen: dict[str, list[Any]] = {}
    t.start()
    for name, p in t.model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: seen.setdefault(name, []).append(q.grad.float().norm())
        )
    t.train(2)
    return dict(sorted(seen.items()))


@rows("`register_post_accumulate_grad_hook` that scales `.grad`", accumulate=ONE)
def scale_accumulated(t: Any) -> None:
    def scale(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    model = nets.build()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(scale)
    t.start(model)
    t.train(3)


@rows("`register_post_accumulate_grad_hook` that drops `.grad`", accumulate=ONE)
def drop_accumulated(t: Any) -> None:
    def drop(p: torch.Tensor) -> None:
        p.grad = None

    t.start()
    t.model.blocks[0].up.weight.register_post_accumulate_grad_hook(drop)
    t.train(3)


@rows("an optimizer of your own that steps in a `post_accumulate_grad_hook`", either())
def optimizer_in_backward(t: Any) -> None:
    t.start()
    own = torch.optim.SGD([t.model.leave.weight], lr=0.05)

    def step(p: torch.Tensor) -> None:
        own.step()
        p.grad = None

    t.model.leave.weight.register_post_accumulate_grad_hook(step)
    t.train(2)


@rows("a hook of the `AccumulateGrad` node", precision=FP32)
def node_hook(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    node = torch.autograd.graph.get_gradient_edge(t.model.leave.weight).node
    node.register_hook(lambda *_: seen.append(1))
    t.train(2)
    return {"seen": seen}


@rows("`register_multi_grad_hook` on the parameters of a block", precision=FP32)
def multi_grad(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    params = list(t.model.blocks[1].parameters())
    torch.autograd.graph.register_multi_grad_hook(
        params, lambda gradients: seen.append(sum(g is not None for g in gradients))
    )
    t.train(2)
    return {"seen": seen}


# ---- of activations


@rows("`register_hook` on an activation")
def activation_hook(t: Any) -> None:
    def scaled(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.5)

    t.start()
    t.model.blocks[1].register_forward_hook(scaled)
    t.train(3)


@rows("`retain_grad` on an activation", world=ONE)
def retain_grad(t: Any) -> dict[str, Any]:
    kept: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    t.start()
    t.model.blocks[1].register_forward_hook(keep)
    t.train(2)
    return {"grads": [output.grad for output in kept]}


@rows("Grad-CAM: an activation and its gradient, through module hooks", world=ONE)
def grad_cam(t: Any) -> dict[str, Any]:
    seen: list[torch.Tensor] = []
    t.start()
    layer = t.model.blocks[2]
    layer.register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
    layer.register_full_backward_hook(lambda _m, _i, gradients: seen.append(gradients[0]))
    t.train(2)
    return {"seen": seen}


# ---- of modules


def with_hook(t: Any, put_on: Callable[[Any], Any], early: bool = False) -> None:
    model = nets.build()
    if early:
        put_on(model)
    t.start(model)
    if not early:
        put_on(model)
    t.train(3)


def add_one(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def halve_input(_module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return inputs[0] * 0.5


@rows("a forward hook that changes a block's output, put on before `initialize`")
def output_before(t: Any) -> None:
    with_hook(t, lambda model: model.blocks[1].register_forward_hook(add_one), early=True)


@rows("a forward hook that changes a block's output, put on after `initialize`")
def output_after(t: Any) -> None:
    with_hook(t, lambda model: model.blocks[1].register_forward_hook(add_one))


@rows("a forward hook with `prepend=True`")
def prepended(t: Any) -> None:
    with_hook(t, lambda m: m.blocks[1].register_forward_hook(add_one, prepend=True))


@rows("a forward hook with `always_call=True`")
def always_called(t: Any) -> None:
    with_hook(t, lambda m: m.blocks[1].register_forward_hook(add_one, always_call=True))


@rows("a forward hook that changes a layer's output inside a block")
def layer_output(t: Any) -> None:
    with_hook(t, lambda model: model.blocks[1].up.register_forward_hook(add_one))


@rows("a forward hook of the model itself")
def root_output(t: Any) -> None:
    with_hook(t, lambda model: model.register_forward_hook(lambda _m, _i, output: output * 2))


@rows("a forward pre-hook that changes a block's input")
def input_after(t: Any) -> None:
    with_hook(t, lambda model: model.blocks[1].register_forward_pre_hook(halve_input))


@rows("a forward pre-hook with `prepend=True`")
def input_first(t: Any) -> None:
    with_hook(t, lambda m: m.blocks[1].register_forward_pre_hook(halve_input, prepend=True))


@rows("a forward pre-hook of the model itself")
def root_input(t: Any) -> None:
    with_hook(t, lambda model: model.register_forward_pre_hook(halve_input))


@rows("a forward pre-hook that reads the module's weight", sharded=either())
def input_reads(t: Any) -> None:
    def scaled(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0] / (1 + module.up.weight.detach().abs().mean())

    with_hook(t, lambda model: model.blocks[1].register_forward_pre_hook(scaled))


@rows("a forward hook that reads the module's weight")
def output_reads(t: Any) -> None:
    def scaled(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output / (1 + module.weight.detach().abs().mean())

    with_hook(t, lambda model: model.blocks[1].up.register_forward_hook(scaled))


@rows("a forward hook `with_kwargs=True`")
def hook_with_kwargs(t: Any) -> None:
    def twice(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs

    with_hook(t, lambda m: m.blocks[1].register_forward_pre_hook(twice, with_kwargs=True))


@rows("hooks removed after the first step")
def hooks_removed(t: Any) -> None:
    t.start()
    handles = [
        t.model.blocks[0].register_forward_hook(add_one),
        t.model.blocks[1].register_forward_pre_hook(halve_input),
    ]
    t.train(1)
    for handle in handles:
        handle.remove()
    t.train(2, start=1)


@rows("all hooks of a module cleared: `module._forward_hooks.clear()`", sharded=either())
def hooks_cleared(t: Any) -> None:
    t.start()
    t.train(1)
    for module in t.model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    t.train(2, start=1)


@rows("a global forward hook")
def global_hook(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        t.train(2)
    finally:
        handle.remove()
    return {"calls": len(seen)}


@rows("`register_full_backward_hook` that changes the input's gradient")
def full_backward(t: Any) -> None:
    def half(_module: nn.Module, grad_input: Any, _grad_output: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    with_hook(t, lambda model: model.blocks[1].register_full_backward_hook(half))


@rows("`register_full_backward_hook` before `initialize`")
def full_backward_early(t: Any) -> None:
    def half(_module: nn.Module, grad_input: Any, _grad_output: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    with_hook(t, lambda model: model.blocks[1].register_full_backward_hook(half), early=True)


@rows("`register_full_backward_pre_hook` that changes the output's gradient")
def full_backward_pre(t: Any) -> None:
    def half(_module: nn.Module, grad_output: Any) -> Any:
        return tuple(g * 0.5 for g in grad_output)

    with_hook(t, lambda model: model.blocks[1].register_full_backward_pre_hook(half))


@rows("full backward hooks on every module")
def full_backward_everywhere(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    for module in t.model.modules():
        module.register_full_backward_hook(lambda *_: seen.append(1))
    t.train(2)
    return {"calls": len(seen)}


@rows("a full backward hook of the model itself")
def full_backward_root(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    t.start()
    t.model.register_full_backward_hook(lambda *_: seen.append(1))
    t.train(2)
    return {"calls": len(seen)}


@rows("a full backward hook that reads the module's weight", sharded=either())
def full_backward_reads(t: Any) -> dict[str, Any]:
    seen: list[float] = []
    t.start()
    layer = t.model.blocks[1].up
    layer.register_full_backward_hook(lambda m, *_: seen.append(float(m.weight.detach().sum())))
    t.train(2)
    return {"seen": seen}


# ---- of autograd


@rows("`saved_tensors_hooks` around the forward")
def saved_tensors(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`save_on_cpu` around the forward")
def save_on_cpu(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        with torch.autograd.graph.save_on_cpu():
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`saved_tensors_hooks` that copy activations and leave parameters")
def saved_low(t: Any) -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, nn.Parameter) or x.ndim < 2 else x.detach().clone()

    t.start()
    for step in t.steps(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`disable_saved_tensors_hooks` around the forward")
def disabled_saved(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`allow_mutation_on_saved_tensors` around forward and backward")
def allow_mutation(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            t.engine.backward(t.loss(step))
        t.engine.step()


@rows("anomaly mode")
def anomaly(t: Any) -> None:
    t.start()
    with torch.autograd.detect_anomaly(check_nan=True):
        t.train(2)


@rows("anomaly mode finds a NaN in backward", raises("nan"), accumulate=ONE, precision=FP32)
def anomaly_nan(t: Any) -> None:
    t.start()
    with torch.autograd.detect_anomaly(check_nan=True):
        t.engine.backward((t.engine(t.batch(0)[0]).abs() * 0 - 1).sqrt().sum())


@rows("an `autograd.Function` of your own between two blocks")
def own_function(t: Any) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return -0.5 * gradient

    with_hook(t, lambda m: m.blocks[0].register_forward_hook(lambda _m, _i, o: Reverse.apply(o)))


TILES = {"max_bytes": 128}


@rows("`p.register_hook` on a weight in tiles, put on before `initialize`", refused("tiling"))
def hook_on_tiles(t: Any) -> None:
    model = nets.build()
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
    t.start(model, tiling=TILES)
    t.train(2)


@rows("`p.register_hook` on a weight in tiles, put on after `initialize`", refused("tiling"))
def later_hook_on_tiles(t: Any) -> None:
    t.start(tiling=TILES)
    t.train(1)
    t.model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
    t.train(1, start=1)


@rows("`register_post_accumulate_grad_hook` on a weight in tiles", refused("blocks.1.down.weight"))
def post_hook_on_tiles(t: Any) -> None:
    t.start(tiling=TILES)
    t.train(1)

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    t.model.blocks[1].down.weight.register_post_accumulate_grad_hook(halve)
    t.train(1, start=1)


@rows("`register_multi_grad_hook` on weights in tiles", refused("tiling"))
def multi_hook_on_tiles(t: Any) -> None:
    t.start(tiling=TILES)
    weights = [t.model.blocks[0].up.weight, t.model.blocks[0].down.weight]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda gradients: None)
    t.train(1)


@rows("a hook on a weight in tiles, removed before the next forward")
def removed_hook_on_tiles(t: Any) -> None:
    t.start(tiling=TILES)
    handle = t.model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
    handle.remove()
    t.train(2)
