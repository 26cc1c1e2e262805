"""At the border with users' code: gradients and backwards. See test_border.py.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import (
    FEATURES,
    SGD,
    Net,
    assert_close,
    build,
    data,
    every_strategy,
    loss_of,
    mine,
    plain,
    start,
)
from torch import nn

# ---- gradients

WAYS = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "model": lambda engine: engine.module.zero_grad(),
    "none": lambda engine: [setattr(p, "grad", None) for p in engine.module.parameters()],
}


def zero_grad_drops_the_window(strategy, way, accumulate):
    engine = start(strategy, batch={"accumulate": accumulate})
    for step in (5, 0):
        for _ in range(accumulate):
            engine.backward(loss_of(engine, *mine(step)))
        assert engine.module.lift.weight.grad is not None
        if step == 5:
            WAYS[way](engine)
            assert engine.module.lift.weight.grad is None
    assert engine.step()
    assert engine.module.lift.weight.grad is None
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@every_strategy
def test_zero_grad_drops_the_window(strategy, way, accumulate, pools):
    state = pools(2).run(zero_grad_drops_the_window, strategy, way, accumulate)[0]
    assert_close(state, plain([0]))


def some_gradients_are_dropped(strategy, accumulate):
    engine = start(strategy, batch={"accumulate": accumulate})
    for _ in range(accumulate):
        engine.backward(loss_of(engine, *mine(0)))
    for p in engine.module.blocks.parameters():
        p.grad = None
    gradients = engine.full_grads()
    engine.step()
    state = engine.state_dict()
    engine.close()
    return gradients, state


@pytest.mark.parametrize("accumulate", [1, 2])
@every_strategy
def test_some_gradients_are_dropped(strategy, accumulate, pools):
    gradients, state = pools(2).run(some_gradients_are_dropped, strategy, accumulate)[0]
    before, after = build().state_dict(), plain([0])
    expected = {n: before[n] if n.startswith("blocks") else after[n] for n in before}
    assert_close(state, expected)
    assert not any(g.any() for name, g in gradients.items() if name.startswith("blocks"))


TOUCHES = {
    "clip-norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip-value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "add": lambda model: model.lift.weight.grad.add_(1.0),
    "norm": lambda model: model.lift.weight.grad.norm(),
    "other-optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
}


def a_touched_gradient_is_an_error(strategy, how):
    engine = start(strategy)
    engine.backward(loss_of(engine, *mine(0)))
    gradient = engine.module.lift.weight.grad
    assert gradient.shape == engine.module.lift.weight.shape
    TOUCHES[how](engine.module)


@pytest.mark.parametrize("how", TOUCHES)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_touched_gradient_is_an_error(strategy, how, pools):
    for failure in pools(2).attempt(a_touched_gradient_is_an_error, strategy, how):
        assert isinstance(failure, Failure), failure
        words = "is sharded" if how == "other-optimizer" and strategy == "zero3" else "full_grads()"
        assert words in failure.text and '"lift.weight"' in failure.text


def an_assigned_gradient_is_an_error(strategy, when):
    engine = start(strategy)
    if when == "after":
        engine.backward(loss_of(engine, *mine(0)))
    engine.module.lift.weight.grad = torch.ones(engine.module.lift.weight.shape)
    if when == "before":
        engine.backward(loss_of(engine, *mine(0)).detach().requires_grad_())
    engine.step()


@pytest.mark.parametrize("when", ["after", "instead"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_assigned_gradient_is_an_error(strategy, when, pools):
    for failure in pools(2).attempt(an_assigned_gradient_is_an_error, strategy, when):
        assert isinstance(failure, Failure) and failure.is_a("RuntimeFault")
        assert "engine.set_grads" in failure.text and '"lift.weight"' in failure.text


def a_nan_is_cured(strategy):
    engine = start(strategy)
    x, y = mine(0)
    engine.backward(loss_of(engine, x, y) * (float("nan") if dist.get_rank() == 1 else 1.0))
    cured = {name: torch.ones_like(g) for name, g in engine.full_grads().items()}
    engine.set_grads(cured)
    engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_a_nan_is_cured(strategy, pools):
    state = pools(2).run(a_nan_is_cured, strategy)[0]
    assert_close(state, {n: value - SGD["lr"] for n, value in build().state_dict().items()})


def a_graph_that_was_kept(strategy):
    engine = start(strategy)
    x, y = mine(0)
    loss = loss_of(engine, x.requires_grad_(), y)
    engine.backward(loss, retain_graph=True)
    engine.step()
    loss_of(engine, x, y)
    engine.backward(loss)


@every_strategy
def test_a_graph_that_was_kept(strategy, pools):
    for failure in pools(2).attempt(a_graph_that_was_kept, strategy):
        assert isinstance(failure, Failure), failure
        assert "modified by an inplace operation" in failure.text


# ---- backwards


class Skips(Net):
    """Its second block returns what it is given, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.blocks[1].forward
        self.skip = False
        self.blocks[1].forward = lambda x: x if self.skip else inner(x)


def blocks_that_return_their_input(strategy):
    model = models.fill(Skips())
    engine = start(strategy, model=model)
    model.skip = dist.get_rank() == 1
    for step in range(3):
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_blocks_that_return_their_input(strategy, pools):
    state = pools(2).run(blocks_that_return_their_input, strategy)[0]
    model = models.fill(Skips())
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(3):
        optimizer.zero_grad()
        x, y = data(step)
        for rank in range(2):
            model.skip = rank == 1
            (loss_of(model, x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]) / 2).backward()
        optimizer.step()
    assert_close(state, model.state_dict())


def frozen_later(strategy):
    engine = start(strategy)
    for step in range(4):
        engine.module.blocks.requires_grad_(step != 1)
        engine.module.lift.weight.requires_grad_(step != 2)
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_frozen_later(strategy, pools):
    state = pools(2).run(frozen_later, strategy)[0]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(4):
        model.blocks.requires_grad_(step != 1)
        model.lift.weight.requires_grad_(step != 2)
        optimizer.zero_grad()
        loss_of(model, *data(step)).backward()
        optimizer.step()
    assert_close(state, model.state_dict())


def through_a_frozen_model(strategy):
    """A generator's backward goes through the critic of another engine, frozen meanwhile."""
    critic = start(strategy)
    lift = nn.Linear(FEATURES, FEATURES, bias=False)
    nn.init.eye_(lift.weight)
    generator = start(strategy, model=lift)
    for step in range(2):
        x, y = mine(step)
        critic.module.requires_grad_(False)
        generator.backward(((critic(generator(x)) - y) ** 2).mean())
        generator.step()
        critic.module.requires_grad_(True)
        with torch.no_grad():
            made = generator(x)
        critic.backward(loss_of(critic, made, y))
        assert critic.step()
    states = critic.state_dict(), generator.state_dict()
    critic.close()
    generator.close()
    return states


@every_strategy
def test_through_a_frozen_model(strategy, pools):
    ours = pools(2).run(through_a_frozen_model, strategy)[0]
    critic, generator = build(), nn.Linear(FEATURES, FEATURES, bias=False)
    nn.init.eye_(generator.weight)
    optimizers = [torch.optim.SGD(m.parameters(), lr=SGD["lr"]) for m in (critic, generator)]
    for step in range(2):
        x, y = data(step)
        critic.requires_grad_(False)
        optimizers[1].zero_grad()
        ((critic(generator(x)) - y) ** 2).mean().backward()
        optimizers[1].step()
        critic.requires_grad_(True)
        optimizers[0].zero_grad()
        loss_of(critic, generator(x).detach(), y).backward()
        optimizers[0].step()
    assert_close(ours[0], critic.state_dict())
    assert_close(ours[1], generator.state_dict())


def a_loss_in_fp16():
    engine = start("zero2", "fp16", loss_scale={"initial": 65536.0})
    for step in range(3):
        x, y = mine(step)
        loss = ((engine(x.half()) - y.half()) ** 2).mean()
        assert loss.dtype == torch.float16
        engine.backward(loss)
        engine.step()
    skipped, scale, steps = engine.skipped_steps, engine.loss_scale, engine.steps
    engine.close()
    return skipped, scale, steps


def test_a_loss_in_fp16(pools):
    skipped, scale, steps = pools(2).run(a_loss_in_fp16)[0]
    assert skipped >= 1 and scale <= 32768.0 and steps == 3 - skipped


def two_backwards_in_low_precision(strategy):
    """A second contribution much smaller than the first is not rounded away."""
    model = nn.Linear(8, 8, bias=False)
    engine = start(strategy, "bf16", model=model)
    for factor in (1.0, 2.0**-10):
        engine.backward(engine(torch.full((1, 8), factor, dtype=torch.bfloat16)).float().sum())
    gradients = engine.full_grads()
    engine.close()
    return gradients


@every_strategy
def test_two_backwards_in_low_precision(strategy, pools):
    gradients = pools(2).run(two_backwards_in_low_precision, strategy)[0]
    assert torch.equal(gradients["weight"], torch.full((8, 8), 1.0 + 2.0**-10))


def a_second_backward_from_hold(strategy):
    engine = start(strategy, table={"param": {"hold": "RR@device:fp32"}})
    x, y = mine(0)
    with torch.no_grad():
        loss_of(engine, x, y)
    loss = loss_of(engine, x, y)
    with torch.no_grad():
        loss_of(engine, x, y)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    gradients = engine.full_grads()
    engine.step()
    engine.close()
    return gradients


def test_a_second_backward_from_hold(pools):
    gradients = pools(2).run(a_second_backward_from_hold, "zero3")[0]
    model = build()
    (2 * loss_of(model, *data(0))).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-5), name


def nothing_trains(strategy, offload):
    model = build().requires_grad_(False)
    engine = start(strategy, model=model, offload=offload)
    out = engine(mine(0)[0])
    state = engine.state_dict()
    engine.close()
    return out, state


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_nothing_trains(strategy, tier, pools, tmp_path):
    offload = {} if tier == "device" or strategy == "ddp" else {"params": tier}
    if "disk" in offload.values():
        offload["path"] = str(tmp_path)
    outcome = pools(2).run(nothing_trains, strategy, offload)
    expected = build()(data(0)[0])
    assert torch.allclose(torch.cat([out for out, _ in outcome]), expected, atol=1e-6)
    assert_close(outcome[0][1], build().state_dict())
