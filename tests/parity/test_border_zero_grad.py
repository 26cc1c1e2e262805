"""At the border with users' code: zero_grad() and other methods of torch that a user's optimizer
overrides run as in torch, or are refused by name.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import pytest
import torch
from ranks import Failure
from test_border import assert_close, build, data, loss_of, mine

LR = 0.1


class Own(torch.optim.Optimizer):
    """SGD with the sum of its gradients, so that it is no class of torch's."""

    calls = 0

    def __init__(self, params):
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class Counts(Own):
    def zero_grad(self, set_to_none=True):
        self.calls += 1
        super().zero_grad(set_to_none)


class Keeps(Own):
    """Drops gradients at every second call only."""

    def zero_grad(self, set_to_none=True):
        self.calls += 1
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


class ByHand(Own):
    def zero_grad(self):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Decays(Own):
    """Changes weights in zero_grad()."""

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
        super().zero_grad(set_to_none)


class InStep(Own):
    """Calls its zero_grad() in step()."""

    def zero_grad(self, set_to_none=True):
        self.calls += 1
        super().zero_grad(set_to_none)

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


class PlainInStep(Own):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


EXACT = [Counts, Keeps, ByHand, Decays, InStep, PlainInStep]


def loop(model, optimizer, batches, backward, step):
    """Takes three steps of two backwards each, with a zero_grad() after the first backward."""
    for one in (0, 2, 4):
        backward(loss_of(model, *batches(one)))
        optimizer.zero_grad()
        backward(loss_of(model, *batches(one + 1)))
        step()
        optimizer.zero_grad()
    return optimizer.calls


def overridden(strategy, make):
    import penstock  # noqa: PLC0415

    model = build()
    given = make(model.parameters())
    engine = penstock.initialize(
        model,
        {"strategy": strategy, "batch": {"accumulate": 1, "reduction": "sum"}},
        optimizer=given,
    )
    calls = loop(engine, given, mine, engine.backward, lambda: engine.step())
    state = engine.state_dict()
    engine.close()
    return calls, state


@pytest.mark.parametrize("make", EXACT)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_overridden(strategy, make, pools):
    calls, state = pools(2).run(overridden, strategy, make, timeout=240)[0]
    model = build()
    optimizer = make(model.parameters())
    expected = loop(model, optimizer, data, lambda loss: loss.backward(), optimizer.step)
    assert calls == expected
    assert_close(state, model.state_dict())


class Some(Own):
    def zero_grad(self, set_to_none=True):
        self.param_groups[0]["params"][0].grad = None


class Reads(Own):
    def zero_grad(self, set_to_none=True):
        self.norm = sum(
            float(p.grad.norm()) for p in self.param_groups[0]["params"] if p.grad is not None
        )
        super().zero_grad(set_to_none)


class Saves(Own):
    def state_dict(self):
        return {"mine": super().state_dict()}


class Loads(Own):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["mine"])


class Adds(Own):
    def add_param_group(self, param_group):
        super().add_param_group({**param_group, "mine": True})


def _replaced(name):
    def make(params):
        made = Own(params)
        setattr(made, name, lambda *_: None)
        return made

    return make


def _zero_grad(engine):
    engine.optimizer.zero_grad()


def _add(engine):
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()


REFUSED = {
    "some": (Some, _zero_grad, "Some.zero_grad() drops the gradients of only some parameters"),
    "reads": (Reads, _zero_grad, "Reads.zero_grad() uses gradients"),
    "saves": (Saves, lambda e: e.optimizer.state_dict(), "the optimizer's state is sharded"),
    "loads": (Loads, lambda e: e.optimizer.load_state_dict({}), "the optimizer's state is sharded"),
    "adds": (Adds, _add, "the groups of Adds changed"),
    "zero_grad": (_replaced("zero_grad"), None, "the optimizer's zero_grad() was replaced"),
    "state_dict": (_replaced("state_dict"), None, "the optimizer's state_dict() was replaced"),
}


def refused(what):
    import penstock  # noqa: PLC0415

    make, act, _ = REFUSED[what]
    model = build()
    engine = penstock.initialize(model, {"strategy": "zero1"}, optimizer=make(model.parameters()))
    try:
        act(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, pools):
    for failure in pools(2).attempt(refused, what, timeout=240):
        assert isinstance(failure, Failure), failure
        assert REFUSED[what][2] in failure.text
