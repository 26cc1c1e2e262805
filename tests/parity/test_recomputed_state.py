"""`activations.checkpoint` recomputes a block as it ran: random numbers of every generator, modes
and fields of modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn

import penstock


class Block(nn.Module):
    """Scales by what `factor` returns."""

    factor: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.calls, self.seen, self.counts = 0, [], {"calls": 0}
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)
        self.legacy, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(4)
        self.last: Any = torch.ones(())
        self.written, self.large = torch.zeros(()), torch.zeros(2048)
        self.up.hits = 0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.factor()
        return x + self.down(torch.tanh(self.up(x * scale))) * scale


def counted(self: Any) -> float:
    self.calls += 1
    return 1 + 0.1 * self.calls


def counted_in_child(self: Any) -> float:
    self.up.hits += 1
    return 1 + 0.1 * self.up.hits


def counted_in_dict(self: Any) -> float:
    self.counts["calls"] += 1
    return 1 + 0.1 * self.counts["calls"]


def counted_in_list(self: Any) -> float:
    self.seen.append(None)
    return 1 + 0.1 * len(self.seen)


def made_in_forward(self: Any) -> float:
    self.first = not hasattr(self, "first")
    return 2.0 if self.first else 0.5


def last_value(self: Any) -> torch.Tensor:
    self.last = self.last * 0.9
    return self.last


def written(self: Any) -> torch.Tensor:
    self.written += 0.1
    return 1 + self.written.clone()


def draws_legacy_normal(_self: Any) -> float:
    return float(np.random.normal())  # the second of a pair comes from a cache


FACTORS = {
    "random.random": lambda _: random.random(),
    "random.sample": lambda _: 1.0 + random.sample(range(9), 3)[0],
    "numpy.random.rand": lambda _: float(np.random.rand()),
    "numpy.random.normal": draws_legacy_normal,
    "random.Random of a module": lambda self: self.python.random(),
    "numpy Generator of a module": lambda self: float(self.numpy.normal()),
    "numpy RandomState of a module": lambda self: float(self.legacy.rand()),
    "torch.Generator of a module": lambda self: torch.rand((), generator=self.torch),
    "torch.rand": lambda _: torch.rand(()),
    "a counter": counted,
    "a counter of a child": counted_in_child,
    "a counter in a dict": counted_in_dict,
    "the length of a list": counted_in_list,
    "a field that the forward makes": made_in_forward,
    "a tensor of the last forward": last_value,
    "a tensor that is written in place": written,
    "the mode": lambda self: 1.0 if self.training else 3.0,
}


def build(factor: Callable[[Any], Any]) -> nn.Module:
    made = type("Block", (Block,), {"factor": factor})
    return models.fill(nn.Sequential(nn.Linear(4, 4), *(made() for _ in range(3))))


def numbers() -> list[float]:
    """The next numbers of each global generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def train(model: nn.Module, run: Any, backward: Any, step: Any, drop: bool) -> list[Any]:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    found: list[Any] = []
    for index in range(3):
        x = torch.linspace(-1, 1, 8).reshape(2, 4) + index
        loss = run(x).square().mean() + run(x * 2).square().mean()
        if drop:
            model.eval()
        backward(loss)
        model.train()
        step()
        found += [float(loss.detach()), *numbers()]
    for one in list(model)[1:]:  # type: ignore[call-overload]
        found += [one.calls, one.up.hits, len(one.seen), one.counts["calls"], one.python.random()]
        found += [float(one.numpy.random()), float(one.last), float(one.written)]
    return found


@pytest.mark.parametrize("name", FACTORS)
def test_a_block_is_recomputed_as_it_ran(name):
    plain, model = build(FACTORS[name]), build(FACTORS[name])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    drop = name == "the mode"
    theirs = train(plain, plain, torch.Tensor.backward, step, drop)
    engine = penstock.initialize(
        model,
        {"strategy": "zero1", "activations": {"checkpoint": "unit"}},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    )
    assert [one.recomputed for one in engine._core.units].count(True) == 3
    ours = train(model, engine, engine.backward, engine.step, drop)
    assert ours == pytest.approx(theirs, rel=1e-5)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key])
    engine.close()


def writes(self: Any) -> torch.Tensor:
    self.large += 1
    return self.large[0].clone()


def test_a_large_tensor_that_is_written_in_place_is_refused():
    model = build(writes)
    engine = penstock.initialize(
        model, {"strategy": "zero1", "activations": {"checkpoint": "unit"}}
    )
    with pytest.raises(penstock.RuntimeFault, match=r'the tensor "large" of one of its modules'):
        engine(torch.ones(2, 4))
    engine.close()
