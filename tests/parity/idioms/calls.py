"""Calling the model and its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import Group, either

rows = Group("Calls of the model and its parts")


def trained_by(t: Any, forward: Any, model: nn.Module | None = None) -> None:
    """`forward(model, features)` instead of the engine's call."""
    t.start(model)
    for step in t.steps(3):
        t.engine.backward(t.loss(step, lambda x: forward(t.model, x)))
        t.engine.step()


# ---- calls


@rows("`model(x)` instead of `engine(x)`")
def call_model(t: Any) -> None:
    trained_by(t, lambda model, x: model(x))


@rows("`model.forward(x)`")
def call_forward(t: Any) -> None:
    trained_by(t, lambda model, x: model.forward(x))


@rows("`engine.forward(x)`")
def engine_forward(t: Any) -> None:
    trained_by(t, lambda _, x: t.engine.forward(x))


@rows("`engine.module(x)`")
def call_module(t: Any) -> None:
    trained_by(t, lambda _, x: t.engine.module(x))


@rows("`model(x)` and `engine(x)` in turns")
def call_both(t: Any) -> None:
    t.start()
    for step in t.steps(4):
        t.engine.backward(t.loss(step, t.model if step % 2 else None))
        t.engine.step()


@rows("`model(x)` under `no_grad` for an evaluation")
def evaluate_model(t: Any) -> None:
    t.start()
    t.train(2)
    t.model.eval()
    with torch.no_grad():
        t.loss(5, t.model)
    t.model.train()
    t.train(1, start=2)


class Generates(nets.Net):
    """With methods that call itself, as language models have."""

    def generate(self, features: torch.Tensor, count: int = 3) -> torch.Tensor:
        for _ in range(count):
            features = features + self(features)[:, None].to(features.dtype)
        return features

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        return self.trunk(features)

    def score(self, features: torch.Tensor) -> torch.Tensor:
        return self.leave(self.embed(features)).squeeze(-1).tanh()


@rows("`model.generate(...)`, a loop of `self(...)` under `no_grad`")
def generate(t: Any) -> dict[str, Any]:
    t.start(nets.build(Generates))
    t.train(2)
    with torch.no_grad():
        made = t.model.generate(torch.ones(1, 6))
    t.train(1, start=2)
    return {"made": made}


@rows("`engine.generate(...)`")
def engine_generate(t: Any) -> dict[str, Any]:
    t.start(nets.build(Generates))
    t.train(2)
    with torch.no_grad():
        made = t.engine.generate(torch.ones(1, 6))
    return {"made": made}


@rows("`model.generate(...)` inside `gathered()`")
def generate_gathered(t: Any) -> dict[str, Any]:
    t.start(nets.build(Generates))
    t.train(2)
    with torch.no_grad(), t.engine.gathered():
        made = t.model.generate(torch.ones(1, 6))
    t.train(1, start=2)
    return {"made": made}


@rows("another method of the model that trains: `model.score(x)`", sharded=either())
def other_method(t: Any) -> None:
    trained_by(t, lambda model, x: model.score(x), nets.build(Generates))


@rows("a block called directly under `no_grad`")
def block_alone(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    with torch.no_grad():
        x = torch.ones(2, 8, dtype=t.model.enter.weight.dtype)
        return {"output": t.model.blocks[1](x)}


@rows("a child of the model called directly under `no_grad`", sharded=either())
def child_alone(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    with torch.no_grad():
        return {"output": t.model.enter(torch.ones(2, 6, dtype=t.model.enter.weight.dtype))}


@rows("a direct call of a layer inside a block", sharded=either())
def layer_alone(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    with torch.no_grad():
        x = torch.ones(2, 8, dtype=t.model.enter.weight.dtype)
        return {"output": t.model.blocks[1].up(x)}


def by_parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.enter(x.to(model.enter.weight.dtype))
    for block in model.blocks:
        x = block(x)
    return model.leave(x).squeeze(-1)


@rows("training through the model's children, one after the other", sharded=either())
def parts_trained(t: Any) -> None:
    trained_by(t, by_parts)


@rows("the encoder under `no_grad`, then the head", sharded=either())
def encoder_then_head(t: Any) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = model.trunk(x)
        return model.leave(x).squeeze(-1)

    trained_by(t, forward)


@rows("`model.blocks[:2](x)`: a slice of a `Sequential`", sharded=either())
def sliced(t: Any) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.enter(x.to(model.enter.weight.dtype))
        return model.leave(model.blocks[:2](x)).squeeze(-1)

    trained_by(t, forward)


@rows("`F.linear(x, model.head.weight)` outside of the model", sharded=either())
def functional(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        x, y = t.batch(step)
        output = t.engine(x).float()
        scale = F.linear(torch.ones(1, 8), t.model.leave.weight.float()).squeeze()
        t.engine.backward(t.note(F.mse_loss(output + 0.1 * scale, y)))
        t.engine.step()


class Reads(nets.Net):
    """A block that reads another block's weight."""

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        x = super().trunk(features)
        return x + F.linear(x, self.blocks[0].up.weight[:8])


@rows("a forward that reads a block's weight outside of that block")
def reads_block(t: Any) -> None:
    t.start(nets.build(Reads))
    t.train(3)


class Twice(nets.Net):
    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        return self.blocks(super().trunk(features))


@rows("each block used twice in a forward")
def used_twice(t: Any) -> None:
    t.start(nets.build(Twice))
    t.train(3)


@rows("each block used twice from the second step on")
def used_twice_later(t: Any) -> None:
    t.start()
    t.train(1)
    t.model.blocks.register_forward_hook(lambda m, _i, x: [x := block(x) for block in m][-1])
    t.train(2, start=1)


class Skips(nets.Net):
    """Blocks in `skipped` do not run."""

    skipped: tuple[int, ...] = ()

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        x = self.enter(features.to(self.enter.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = block(x)
        return x


@rows("layer drop: another block is skipped in each step")
def layer_drop(t: Any) -> None:
    t.start(nets.build(Skips))
    for step in t.steps(4):
        t.model.skipped = (step % 3,)
        t.engine.backward(t.loss(step))
        t.engine.step()


class MayReturnInput(nets.Mlp):
    idle = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.idle else super().forward(x)


class Stochastic(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MayReturnInput() for _ in range(3)))


@rows("a block that returns its input, in some steps")
def returns_input(t: Any) -> None:
    t.start(nets.build(Stochastic))
    for step in t.steps(4):
        t.model.blocks[1].idle = step % 2 == 0
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("stochastic depth: a block that returns its input on one rank", world=(2,))
def returns_input_on_one(t: Any) -> None:
    """Half the samples go through the block; plain torch has both halves as two forwards."""
    t.start(nets.build(Stochastic))
    block = t.model.blocks[1]
    for step in t.steps(3):
        x, y = t.batch(step)
        losses = []
        for rank in range(2) if t.plain else [t.rank]:
            block.idle = rank == 1
            mine = slice(rank, None, 2) if t.plain else slice(None)
            losses.append(F.mse_loss(t.engine(x[mine]).float(), y[mine]))
        t.engine.backward(t.note(sum(losses) / len(losses)))
        t.engine.step()


@rows("two forwards before one backward")
def two_forwards(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step) + t.loss(step + 10))
        t.engine.step()


@rows("a forward whose output is never used")
def unused_forward(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.loss(step + 10)
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("`no_grad` in the middle of the forward")
def no_grad_inside(t: Any) -> None:
    class Cut(nets.Net):
        def trunk(self, features: torch.Tensor) -> torch.Tensor:
            x = self.enter(features.to(self.enter.weight.dtype))
            with torch.no_grad():
                x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x))

    t.start(nets.build(Cut))
    t.train(3)


@rows("`detach()` in the middle of the forward")
def detach_inside(t: Any) -> None:
    t.start()
    t.model.blocks[0].register_forward_hook(lambda _m, _i, x: x.detach())
    t.train(3)


@rows("`set_grad_enabled(False)` around an evaluation")
def grad_disabled(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        with torch.set_grad_enabled(False):
            t.loss(step + 10)
        t.engine.backward(t.loss(step))
        t.engine.step()


@rows("an evaluation in inference mode between forward and backward")
def inference_between(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        loss = t.loss(step)
        with torch.inference_mode():
            t.loss(step + 10)
        t.engine.backward(loss)
        t.engine.step()


@rows("an evaluation between backward and step")
def evaluation_between(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        t.engine.eval()
        with torch.no_grad():
            t.loss(step + 10)
        t.engine.train()
        t.engine.step()


@rows("attributes of the model through the engine, and `engine.module`")
def through_engine(t: Any) -> dict[str, Any]:
    t.start(nets.build(Skips))
    t.engine.module.skipped = (0,)
    t.train(2)
    return {"skipped": t.engine.skipped, "blocks": len(t.engine.blocks)}


@rows("`model.forward = wrapped` after `initialize`")
def forward_replaced(t: Any) -> None:
    t.start()
    original = t.model.forward
    t.model.forward = lambda x: original(x) * 2
    t.train(3)


@rows("a block's `forward` replaced after `initialize`")
def block_forward_replaced(t: Any) -> None:
    t.start()
    block = t.model.blocks[1]
    original = block.forward
    block.forward = lambda x: original(x) * 2
    t.train(3)


@rows("a block's class replaced: `block.__class__ = ...`")
def class_replaced(t: Any) -> None:
    t.start(nets.build(Stochastic))
    t.model.blocks[1].__class__ = nets.Mlp
    t.train(3)
