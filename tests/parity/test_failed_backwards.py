"""A backward that raises and is caught: what it gave and what earlier backwards gave stays, as in
torch, or the next call is an error.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import SGD, assert_close, build, data, every_strategy, loss_of, mine, start


class Planned(Exception):
    pass


def _raise(_gradient):
    raise Planned


@contextlib.contextmanager
def failing(model, at):
    """In this context the backward raises where it leaves block `at`."""
    handle = model.blocks[at].register_forward_hook(
        lambda _m, _i, out: out.register_hook(_raise) and None
    )
    try:
        with contextlib.suppress(Planned):
            yield
    finally:
        handle.remove()


class Plain:
    """Torch on the whole batch, of which each rank has a half."""

    def __init__(self, accumulate):
        self.module = build()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=SGD["lr"])
        self.accumulate = accumulate
        self.calls = 0

    def backward(self, batch, at, engines_own=True):
        self.calls += 1
        x, y = data(batch)
        for half in (slice(0, 2), slice(2, 4)):
            with failing(self.module, at) if at is not None else contextlib.nullcontext():
                loss = loss_of(self.module, x[half], y[half])
                (loss / (2 * self.accumulate)).backward()

    def step(self):
        if self.calls < self.accumulate:
            return False
        self.optimizer.step()
        self.zero_grad()
        return True

    def zero_grad(self):
        self.calls = 0
        self.optimizer.zero_grad()

    def gradients(self):
        named = self.module.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}


class Ours:
    def __init__(self, strategy, accumulate, **others):
        batch = {"accumulate": accumulate}
        self.engine = start(strategy, batch=batch, **others)
        self.module = self.engine.module

    def backward(self, batch, at, engines_own=True):
        with failing(self.module, at) if at is not None else contextlib.nullcontext():
            loss = loss_of(self.engine, *mine(batch))
            self.engine.backward(loss) if engines_own else loss.backward()

    def step(self):
        return self.engine.step()

    def zero_grad(self):
        self.engine.zero_grad()

    def gradients(self):
        return self.engine.full_grads()


def follow(one, script):
    """Runs the script, a call a letter; the results of steps, and the gradients that were read.

    g: backward. x, y: a backward that raises late, early. p: as x, by `loss.backward()`.
    s: step. z, m: zero_grad() of the engine, of the model. r: reads gradients. e: an evaluation.
    """
    applied, read = [], []
    for batch, call in enumerate(script):
        if call in "gxyp":
            one.backward(batch, {"x": 0, "p": 1, "y": 2}.get(call), engines_own=call != "p")
        elif call == "s":
            applied.append(one.step())
        elif call == "r":
            read.append(one.gradients())
        elif call == "z":
            one.zero_grad()
        elif call == "m":
            one.module.zero_grad()
            one.calls = 0
        else:
            with torch.no_grad():
                one.module(data(0)[0])
    return applied, read


# script, accumulate
SCRIPTS = {
    "second-of-three": ("gxgsgs", 1),
    "first": ("xggsgs", 1),
    "last": ("ggysgs", 1),
    "two": ("gxygsgs", 1),
    "plain": ("gpgsgs", 1),
    "alone": ("gsxgsgs", 1),
    "step-follows": ("gsxsgs", 1),
    "counts": ("gsxsgsgsgsgs", 3),
    "last-of-window": ("gsgsysgsgsgs", 3),
    "first-of-window": ("psgsgsgsgsgs", 3),
    "all-of-window": ("xsysxsgsgsgs", 3),
    "read": ("gxrgrs", 1),
    "evaluated": ("gxegsgs", 1),
    "dropped": ("gxzgsgs", 1),
    "dropped-by-model": ("gxmgsgs", 1),
}


def backward_raises(strategy, what, others):
    script, accumulate = SCRIPTS[what]
    ours = Ours(strategy, accumulate, **others)
    applied, read = follow(ours, script)
    state = ours.engine.state_dict()
    ours.engine.close()
    return applied, read, state


def check(pools, strategy, what, others):
    applied, read, state = pools(2).run(backward_raises, strategy, what, others, timeout=180)[0]
    script, accumulate = SCRIPTS[what]
    plain = Plain(accumulate)
    expected, gradients = follow(plain, script)
    assert applied == expected
    assert len(read) == len(gradients)
    for ours, theirs in zip(read, gradients, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    assert_close(state, plain.module.state_dict())


@pytest.mark.parametrize("what", SCRIPTS)
@every_strategy
def test_backward_raises(strategy, what, pools):
    check(pools, strategy, what, {})


@pytest.mark.parametrize("what", ["second-of-three", "counts"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_backward_raises_with_offload(tier, what, pools, tmp_path):
    offload = {"optimizer": tier, "gradients": tier}
    if tier == "disk":
        offload |= {"params": tier, "path": str(tmp_path)}
    check(pools, "zero3", what, {"offload": offload})


def engine_raises(strategy, follows):
    """The engine's own error: the gradients of that backward are incomplete, so earlier backwards
    do not count silently."""
    import penstock  # noqa: PLC0415

    engine = start(strategy, batch={"accumulate": 1})
    engine.backward(loss_of(engine, *mine(0)))
    weight = engine.module.blocks[1].up.weight

    def edit(gradient):
        with torch.no_grad():
            weight.mul_(1.0)
        return gradient

    handle = weight.register_hook(edit)
    try:
        engine.backward(loss_of(engine, *mine(1)))
    except penstock.RuntimeFault as error:
        said = [str(error)]
    handle.remove()
    calls = {
        "forward": lambda: engine(mine(2)[0]),
        "step": lambda: engine.step(),
        "full_grads": engine.full_grads,
    }
    for _ in range(2):  # until zero_grad()
        try:
            calls[follows]()
        except penstock.RuntimeFault as error:
            said.append(str(error))
    engine.zero_grad()
    engine.backward(loss_of(engine, *mine(3)))
    assert engine.step()
    state = engine.state_dict()
    engine.close()
    return said, state


@pytest.mark.parametrize("follows", ["forward", "step", "full_grads"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_engine_raises(strategy, follows, pools):
    said, state = pools(2).run(engine_raises, strategy, follows, timeout=180)[0]
    assert "was changed in place" in said[0]
    assert len(said) == 3
    for text in said[1:]:
        assert text.startswith(
            f"[engine::{follows}] an error of the engine ended the last backward"
        )
        assert "zero_grad()" in text
    model = build()
    loss_of(model, *data(3)).backward()
    torch.optim.SGD(model.parameters(), lr=SGD["lr"]).step()
    assert_close(state, model.state_dict())


def uneven(strategy):
    """One rank's backward raises, the other's does not."""
    ours = Ours(strategy, 1, comm={"timeout_s": 10})
    ours.backward(0, None)
    ours.backward(1, 1 if dist.get_rank() == 1 else None)
    assert ours.step()
    state = ours.engine.state_dict()
    ours.engine.close()
    return state


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_uneven(strategy, pools):
    """The sum of what all ranks gave, or an error on each rank."""
    outcomes = pools(2).attempt(uneven, strategy, timeout=180)
    if all(isinstance(outcome, Failure) for outcome in outcomes):
        assert all("an error" in outcome.text for outcome in outcomes), outcomes
        return
    plain = Plain(1)
    plain.backward(0, None)
    x, y = data(1)
    for half, at in ((slice(0, 2), None), (slice(2, 4), 1)):
        with failing(plain.module, at) if at is not None else contextlib.nullcontext():
            (loss_of(plain.module, x[half], y[half]) / 2).backward()
    plain.step()
    assert_close(outcomes[0], plain.module.state_dict())
