"""Split backwards (the schedule "zero_bubble") of models whose graphs are hard to split."""

from __future__ import annotations

from typing import Any

import pipeline_models as models
import pytest
import torch
from ranks import Failure
from test_pipeline_life import SPLIT, far, plain_steps, start, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5


class Inner(nn.Module):
    """Small weights of its own around a large layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(width))
        self.layer = nn.Linear(width, width)
        self.after = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x * self.before).tanh() * self.after


class Blocks(nn.Module):
    """`kind`: "plain", "checkpoint", "reentrant" or "dropout"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(models.VOCAB, models.WIDTH)
        self.blocks = nn.ModuleList(Inner(models.WIDTH) for _ in range(6))
        self.drop = nn.Dropout(0.2 if kind == "dropout" else 0.0)
        self.head = nn.Linear(models.WIDTH, models.VOCAB)
        self.kind = kind

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for i, block in enumerate(self.blocks):
            if self.kind == "checkpoint" or (self.kind == "reentrant" and i == 4):
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = self.drop(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(kind: str) -> Blocks:
    return models.fill(Blocks(kind), 3)


BATCHES = [models.batch(step, 0, 3) for step in range(3)]


def trained(model: nn.Module, strategy: str, **config: Any) -> dict[str, torch.Tensor]:
    engine = start(model, strategy, micro=3, **config)
    for one in BATCHES:
        engine.train_batch(one)
    engine.close()
    return weights_of(model)


def beside_plain(kind: str, strategy: str, layer_bytes: int) -> float:
    found = trained(build(kind), strategy, units={"layer_bytes": layer_bytes}, **SPLIT)
    return far(found, weights_of(plain_steps(build(kind), BATCHES, 3)))


@pytest.mark.parametrize(
    "layer_bytes", [1, 200, 1 << 20]
)  # the large layer is a unit, or the block
@pytest.mark.parametrize("kind", ["plain", "checkpoint"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_units_in_units(strategy, kind, layer_bytes, pools):
    assert max(pools(2).run(beside_plain, kind, strategy, layer_bytes)) < LIMIT


def beside_1f1b(strategy: str, autocast: bool) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        split = trained(build("dropout"), strategy, **SPLIT)
        return far(split, trained(build("dropout"), strategy))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_random_numbers_of_1f1b(strategy, autocast, pools):
    assert max(pools(2).run(beside_1f1b, strategy, autocast)) < LIMIT


def compiled(strategy: str) -> float:
    model = build("plain")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    found = trained(model, strategy, **SPLIT)
    return far(found, weights_of(plain_steps(build("plain"), BATCHES, 3)))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_compiled_blocks(strategy, pools):
    assert max(pools(2).run(compiled, strategy)) < LIMIT


def in_turn(strategy: str) -> float:
    """Steps of two schedules, with evaluations between them."""
    model = build("plain")
    for one, config in zip(BATCHES, (SPLIT, {}, SPLIT), strict=True):
        engine = start(model, strategy, micro=3, **config)
        engine.train_batch(one)
        engine.eval_batch(one)
        engine.close()
    return far(weights_of(model), weights_of(plain_steps(build("plain"), BATCHES, 3)))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_schedules_in_turn(strategy, pools):
    assert max(pools(2).run(in_turn, strategy)) < LIMIT


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> Any:
        raise ValueError("of the model")


class Angry(Blocks):
    """`of`: "value" (its gradient is on the way to the inputs) or "weight"."""

    def __init__(self, of: str) -> None:
        super().__init__("plain")
        self.of = of

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        x = Raises.apply(x) if self.of == "value" else x
        weight = self.head.weight if self.of == "value" else Raises.apply(self.head.weight)
        logits = nn.functional.linear(x, weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fails(model: nn.Module) -> None:
    start(model, "zero2", **SPLIT).train_batch(models.batch(0, 0, 2))


@pytest.mark.parametrize("of", ["value", "weight"])
def test_errors_of_the_model_keep_their_type(of, pools):
    told = pools(2).attempt(fails, Angry(of))
    assert all(isinstance(one, Failure) for one in told)
    assert "ValueError: of the model" in str(told[1]) and "rank 1" in str(told[0])


def test_reentrant_checkpoints_are_refused(pools):
    told = pools(2).attempt(fails, build("reentrant"))
    assert "use_reentrant=True" in str(told[1]) and isinstance(told[0], Failure)
