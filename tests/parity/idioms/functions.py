"""torch.func, checkpointing, autocast, tracing: torch's own machinery around a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.utils import fusion, stateless
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from idioms import nets, trial
from idioms.table import SINCE_2_12, Group, either, raises, refused

rows = Group("torch's own machinery")
ONE = (1,)
FP32 = ("fp32",)


def detached(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- torch.func


@rows("`functional_call` with other weights", sharded=either())
def other_weights(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    others = {
        name: torch.full(p.shape, 0.1, dtype=p.dtype) for name, p in t.model.named_parameters()
    }
    with torch.no_grad():
        output = functional_call(t.model, others, (torch.ones(1, 6),))
    t.train(1, start=1)
    return {"output": output}


@rows("`functional_call` with other weights, inside `gathered()`")
def other_weights_gathered(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    others = {
        name: torch.full(p.shape, 0.1, dtype=p.dtype) for name, p in t.model.named_parameters()
    }
    with torch.no_grad(), t.engine.gathered():
        output = functional_call(t.model, others, (torch.ones(1, 6),))
    t.train(1, start=1)
    return {"output": output}


@rows("`functional_call` with the model's own parameters, trained", sharded=either())
def own_weights(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        own = dict(t.model.named_parameters())
        t.engine.backward(t.loss(step, lambda x, own=own: functional_call(t.model, own, (x,))))
        t.engine.step()


@rows("`functional_call` of some parameters, trained: a fast weight", sharded=either())
def fast_weight(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        fast = {"leave.bias": t.model.leave.bias * 2}
        t.engine.backward(t.loss(step, lambda x, fast=fast: functional_call(t.model, fast, (x,))))
        t.engine.step()


@rows("`stateless.functional_call`", sharded=either())
def old_functional(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    others = {
        name: torch.full(p.shape, 0.1, dtype=p.dtype) for name, p in t.model.named_parameters()
    }
    with torch.no_grad():
        return {"output": stateless.functional_call(t.model, others, (torch.ones(1, 6),))}


def loss_of(model: nn.Module, weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(functional_call(model, weights, (x[None],)).float(), y[None])


@rows("per-sample gradients with `vmap` and `grad`", sharded=either(), precision=FP32)
def per_sample(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    weights = detached(t.model)
    x, y = t.batch(3)
    made = vmap(grad(lambda w, a, b: loss_of(t.model, w, a, b)), (None, 0, 0))(weights, x, y)
    t.train(1, start=1)
    return {name: value.mean(0) for name, value in made.items()}


@rows("per-sample gradients inside `gathered()`", precision=FP32)
def per_sample_gathered(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    x, y = t.batch(3)
    with t.engine.gathered():
        weights = detached(t.model)
        made = vmap(grad(lambda w, a, b: loss_of(t.model, w, a, b)), (None, 0, 0))(weights, x, y)
    t.train(1, start=1)
    return {name: value.mean(0) for name, value in made.items()}


@rows("a `jvp` along a direction of the weights", sharded=either(), precision=FP32)
def jacobian_vector(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    weights = detached(t.model)
    along = {name: torch.ones_like(value) for name, value in weights.items()}
    _, slope = jvp(lambda w: functional_call(t.model, w, (torch.ones(1, 6),)), (weights,), (along,))
    return {"slope": slope}


@rows("`torch.func.jacrev` of the output by the input")
def jacobian(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    made = torch.autograd.functional.jacobian(lambda x: t.engine(x).float(), torch.ones(1, 6))
    t.train(1, start=1)
    return {"jacobian": made}


@rows("`vmap` over the model", sharded=either(), precision=FP32)
def mapped(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with torch.no_grad():
        made = vmap(lambda x: t.model(x[None])[0])(torch.ones(3, 6))
    t.train(1, start=1)
    return {"made": made}


@rows("`stack_module_state` of two models; only one of them trains", sharded=either())
def stacked(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    other = nets.build().to(t.model.leave.weight.dtype)
    params, _ = stack_module_state([t.model, other])
    return {name: value.float().sum() for name, value in params.items()}


@rows("MAML: an inner step on fast weights", sharded=either(), world=ONE, precision=FP32)
def maml(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        own = dict(t.model.named_parameters())
        x, y = t.batch(step)
        inner = F.mse_loss(functional_call(t.model, own, (x,)), y)
        slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        fast = {n: p - 0.05 * s for (n, p), s in zip(own.items(), slopes, strict=True)}
        t.engine.backward(t.loss(step + 5, lambda x, w=fast: functional_call(t.model, w, (x,))))
        t.engine.step()


# ---- checkpointing


class Checkpointed(nets.Net):
    reentrant = False

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        x = self.enter(features.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@rows("`checkpoint(use_reentrant=False)`")
def not_reentrant(t: Any) -> None:
    t.start(nets.build(Checkpointed))
    t.train(3)


@rows("`checkpoint(use_reentrant=True)`")
def reentrant(t: Any) -> None:
    t.start(nets.build(Checkpointed))
    t.model.reentrant = True
    t.train(3)


@rows("`checkpoint_sequential`")
def sequential(t: Any) -> None:
    class Sequential(nets.Net):
        def trunk(self, features: torch.Tensor) -> torch.Tensor:
            x = self.enter(features.to(self.enter.weight.dtype))
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    t.start(nets.build(Sequential))
    t.train(3)


@rows("`checkpoint` around the engine's call")
def around_engine(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: checkpoint(t.engine, x, use_reentrant=False)))
        t.engine.step()


@rows("`checkpoint` around a part of a block")
def around_layer(t: Any) -> None:
    class Inner(nets.Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = checkpoint(lambda h: torch.tanh(self.up(h)), self.norm(x), use_reentrant=False)
            return x + self.down(up)

    model = nets.Net()
    model.blocks = nn.Sequential(*(Inner() for _ in range(3)))
    t.start(nets.models.fill(model))
    t.train(3)


@rows("a checkpointed forward that is never differentiated")
def checkpoint_unused(t: Any) -> None:
    t.start(nets.build(Checkpointed))
    for step in t.steps(3):
        t.loss(step + 10)
        t.engine.backward(t.loss(step))
        t.engine.step()


# ---- autocast


@rows("`autocast` around the engine's call", rough=True, precision=FP32)
def autocast_around(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`autocast(enabled=False)` inside the model", rough=True)
def autocast_off(t: Any) -> None:
    class Careful(nets.Net):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            x = self.trunk(features)
            with torch.autocast("cpu", enabled=False):
                return self.leave(x).squeeze(-1)

    t.start(nets.build(Careful))
    t.train(3)


# ---- tracing and compiling


@rows("`torch.jit.trace(model, x)` to inspect the model", sharded=either())
def traced(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with torch.no_grad():
        made = torch.jit.trace(t.model, torch.ones(2, 6), check_trace=False)
    t.train(1, start=1)
    return {"nodes": len(list(made.graph.nodes())) > 0}


@rows("`torch.fx.symbolic_trace(model)`, run on its own", sharded=either())
def symbolic(t: Any) -> dict[str, Any]:
    class Static(nets.Net):
        def trunk(self, features: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.enter(features))

    t.start(nets.build(Static))
    x = torch.ones(2, 6, dtype=t.model.enter.weight.dtype)
    made = torch.fx.symbolic_trace(t.model)
    with torch.no_grad():
        return {"output": made(x)}


@rows("counting operations with a `TorchDispatchMode`")
def dispatch_mode(t: Any) -> dict[str, Any]:
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    t.start()
    with FlopCounterMode(display=False) as counter:
        loss = t.loss(0)
    t.engine.backward(loss)
    t.engine.step(force=True)
    return {"flops": counter.get_total_flops() * t.world}


@rows("`torch.profiler` around a step")
def profiled(t: Any) -> dict[str, Any]:
    t.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        t.train(1)
    t.train(1, start=1)
    return {"seen": len(profile.key_averages()) > 0}


@rows("`fuse_conv_bn_eval` of a part", sharded=either(), precision=FP32)
def fused(t: Any) -> dict[str, Any]:
    class Convolves(nets.Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)

        def trunk(self, features: torch.Tensor) -> torch.Tensor:
            x = features[:, None].to(self.conv.weight.dtype)
            return super().trunk(features) + self.norm(self.conv(x)).mean((1, 2))[:, None]

    t.start(nets.build(Convolves))
    t.engine.eval()
    t.train(2)
    made = fusion.fuse_conv_bn_eval(t.model.conv.eval(), t.model.norm.eval())
    return {"weight": made.weight.float().sum()}


@rows("observers as in `torch.ao`: hooks added with `apply`")
def observers(t: Any) -> dict[str, Any]:
    seen: dict[str, float] = {}

    def observe(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        name = type(module).__name__
        seen[name] = max(seen.get(name, 0.0), float(output.detach().abs().max() > 0))

    t.start()
    t.model.apply(lambda m: m.register_forward_hook(observe) and None)
    t.train(2)
    return dict(sorted(seen.items()))


@rows("`copy.copy(model)`, called", sharded=either())
def shallow(t: Any) -> None:
    t.start()
    shallow = copy.copy(t.model)
    for step in t.steps(2):
        t.engine.backward(t.loss(step, shallow))
        t.engine.step()


@rows("deterministic algorithms and a seed")
def deterministic(t: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        t.start()
        t.train(2)
    finally:
        torch.use_deterministic_algorithms(False)


# Before 2.12 torch's mse_loss of fp32 and fp64 has no backward.
@rows("`torch.set_default_dtype` while training", SINCE_2_12, precision=FP32)
def default_dtype(t: Any) -> None:
    t.start()
    t.train(1)
    torch.set_default_dtype(torch.float64)
    try:
        t.train(2, start=1)
    finally:
        torch.set_default_dtype(torch.float32)


# Before 2.13 torch's own optimizers put their counts of steps on the meta device.
@rows('`with torch.device("meta")` around a step', either(since=(2, 13)))
def default_device(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        loss = t.loss(step)
        with torch.device("meta"):
            t.engine.backward(loss)
            t.engine.step()


@rows("`engine.step()` under `no_grad`, backward under `enable_grad`")
def under_no_grad(t: Any) -> None:
    t.start()
    with torch.no_grad():
        for step in t.steps(3):
            with torch.enable_grad():
                loss = t.loss(step)
                t.engine.backward(loss)
            t.engine.step()


@rows("backward and step under `no_grad`")
def backward_no_grad(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        loss = t.loss(step)
        with torch.no_grad():
            t.engine.backward(loss)
            t.engine.step()


@rows("backward and step in inference mode", either())
def backward_inference(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        loss = t.loss(step)
        with torch.inference_mode(not t.plain):
            t.engine.backward(loss)
            t.engine.step()


@rows("a forward in inference mode whose loss is differentiated", raises("grad"))
def inference_loss(t: Any) -> None:
    t.start()
    with torch.inference_mode():
        loss = t.loss(0)
    t.engine.backward(loss)


@rows("`initialize` in inference mode or under `no_grad`", either())
def set_up_no_grad(t: Any) -> None:
    with torch.no_grad():
        t.start()
    t.train(2)


@rows("parameters made in inference mode", refused("inference"))
def inference_parameters(t: Any) -> None:
    model = nets.build()
    with torch.inference_mode(not t.plain):
        model.leave.weight = nn.Parameter(torch.ones(1, 8))
    t.start(model)
    t.train(2)


def exported(t: Any, **options: Any) -> dict[str, Any]:
    """The outputs of the exported program and of the model."""
    features, _ = nets.batch(1, trial.SAMPLES)
    program = torch.export.export(t.model, (features,), **options)
    return {"of program": program.module()(features), "of model": t.model(features)}


@rows("`torch.export` inside `gathered()`", precision=FP32)
def exports(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered(), torch.no_grad():
        found = exported(t)
    t.train(1, start=1)
    return found


@rows("`torch.export(strict=True)` inside `gathered()`", precision=FP32)
def exports_strictly(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered(), torch.no_grad():
        return exported(t, strict=True)


@rows("`torch.export` outside of `gathered()`", sharded=either(), precision=FP32)
def exports_outside(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with torch.no_grad():
        return exported(t)
