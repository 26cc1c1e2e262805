"""Calls of backward, and `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import IN_MEMORY, Group, either, raises, refused

rows = Group("Backwards")
ONE = (1,)
FP32 = ("fp32",)


@rows("two backwards before a step", accumulate=ONE)
def two_backwards(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(2 * step))
        t.engine.backward(t.loss(2 * step + 1))
        t.engine.step()


@rows(
    "large and small losses, each with a backward of its own, before a step",
    accumulate=ONE,
    tier=IN_MEMORY,
)
def large_and_small(t: Any) -> None:
    """Small ones are lost where sums are not in fp32; plain torch has the sum of the losses. In
    bf16 gradients on disk that no `accumulate` announced are such sums, as in torch."""
    t.start()
    x, y = t.batch(0)
    for factor in (8,) if t.plain else (256, *(1,) * 8, -256):
        t.engine.backward(factor * F.mse_loss(t.engine(x).float(), y))
    t.engine.step()


@rows("`loss.backward()` without the engine", accumulate=ONE)
def direct(t: Any) -> None:
    t.start()
    for step in range(3):
        t.loss(step).backward()
        t.engine.step()


@rows("`torch.autograd.backward` of several losses", accumulate=ONE)
def several_roots(t: Any) -> None:
    t.start()
    for step in range(3):
        torch.autograd.backward([t.loss(step), t.loss(step + 1)])
        t.engine.step()


@rows("`backward(gradient=...)` of an output", accumulate=ONE)
def seeded(t: Any) -> None:
    t.start()
    for step in range(3):
        output = t.engine(t.batch(step)[0])
        t.engine.backward(output, gradient=output.detach() / len(output))
        t.engine.step()


@rows("`backward(inputs=[...])` of some parameters", either(), accumulate=ONE)
def some_inputs(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in range(3):
        t.engine.backward(t.loss(step), inputs=list(t.model.leave.parameters()))
        seen.append([p.grad is None for p in t.model.parameters()])
        t.engine.step()
    return {"seen": seen}


@rows("saliency: `backward(inputs=[x])` closes no window")
def saliency(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        x = t.batch(step)[0].requires_grad_()
        t.engine.backward(t.engine(x).float().sum(), inputs=[x])
        assert x.grad is not None
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("adversarial training: the sign of the input's gradient", precision=FP32, accumulate=ONE)
def adversarial(t: Any) -> None:
    t.start()
    for step in range(3):
        x, y = t.batch(step)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(t.engine(x), y), x)
        loss = F.mse_loss(t.engine(x.detach() + 0.1 * slope.sign()), y)
        t.engine.backward(t.note(loss))
        t.engine.step()


@rows("the input's `.grad`", world=ONE)
def input_grad(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in t.steps(2):
        x = t.batch(step)[0].requires_grad_()
        t.engine.backward(t.engine(x).float().pow(2).mean())
        seen.append(x.grad)
        t.engine.step()
    return {"seen": seen}


@rows("a penalty on the input's gradient with `create_graph`")
def penalty(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        x, y = t.batch(step)
        x.requires_grad_()
        output = t.engine(x).float()
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        t.engine.backward(t.note(F.mse_loss(output, y) + slope.pow(2).sum(-1).mean()))
        t.engine.step()


@rows("a penalty on the parameters' gradients", sharded=either(), world=ONE)
def parameter_penalty(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        loss = t.loss(step)
        slopes = torch.autograd.grad(loss, list(t.model.leave.parameters()), create_graph=True)
        t.engine.backward(loss + 0.1 * sum(slope.float().pow(2).sum() for slope in slopes))
        t.engine.step()


@rows("`torch.autograd.grad` of all parameters beside the training", sharded=either())
def grad_of_parameters(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in t.steps(2):
        slopes = torch.autograd.grad(t.loss(step), list(t.model.parameters()))
        seen += slopes
        t.engine.backward(t.loss(step))
        t.engine.step()
    return {"seen": seen}


@rows("`backward(create_graph=True)`", refused("create_graph"))
def with_graph(t: Any) -> None:
    t.start()
    t.engine.backward(t.loss(0), create_graph=True)


@rows("`retain_graph=True` and a second backward")
def retained(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        loss = t.loss(step)
        t.engine.backward(loss, retain_graph=True)
        t.engine.backward(loss)
        t.engine.step(force=True)


@rows("a retained graph after the step", raises(), precision=FP32, accumulate=ONE)
def stale_graph(t: Any) -> None:
    t.start()
    loss = t.loss(0)
    t.engine.backward(loss, retain_graph=True)
    t.engine.step()
    t.engine.backward(loss)


@rows("a second backward of a freed graph", raises("second time"))
def graph_is_gone(t: Any) -> None:
    t.start()
    loss = t.loss(0)
    t.engine.backward(loss)
    t.engine.backward(loss)


@rows("backward of a loss that needs no gradient", raises())
def needs_none(t: Any) -> None:
    t.start()
    with torch.no_grad():
        loss = t.loss(0)
    t.engine.backward(loss)


@rows("backward of a loss that is not a scalar", raises("scalar outputs"))
def no_scalar(t: Any) -> None:
    t.start()
    t.engine.backward(t.engine(nets.batch(0, 4)[0]))


@rows("an embedding with `sparse=True`", either(), precision=FP32)
def sparse(t: Any) -> None:
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Flatten(), nn.Linear(24, 1))
    t.start(nets.models.fill(model), lambda params: torch.optim.SGD(params, lr=0.1))
    for step in t.steps(2):
        tokens = (t.batch(step)[0][:, :4].abs() * 4).long() % 10
        t.engine.backward(t.note(t.engine(tokens).pow(2).mean()))
        t.engine.step()
