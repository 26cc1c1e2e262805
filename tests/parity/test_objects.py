"""Blocks that are given an object and change it, as models do with a cache of keys and values; and
parameters that come or get a parametrization between or inside forwards.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import collections
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import zoo
from ranks import Failure
from test_border import FEATURES, SGD, Net, assert_close, data, loss_of, mine, start
from torch import nn
from torch.nn.utils import parametrize


class Slot:
    """Of a block, with a field that comes with the first entry."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = torch.cat([self.seen, x]) if self.count > 1 else x
        return self.seen


class Notes:
    """What blocks have seen, block by block, in containers of every kind."""

    __slots__ = ("by_name", "order", "places", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.places: set[int] = set()
        self.order: collections.deque[int] = collections.deque()

    def add(self, x: torch.Tensor, place: int) -> torch.Tensor:
        if place == len(self.slots):
            self.slots.append(Slot())
        self.by_name[f"block {place}"] = x
        self.places.add(place)
        self.order.append(place)
        seen = self.slots[place].add(x)
        assert len(self.by_name) == len(self.places) == len(self.order) == place + 1
        return seen.sum() * 0.01 * x + self.by_name["block 0"]


class Noting(zoo.Mlp):
    place = 0

    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:  # type: ignore[override]
        return super().forward(notes.add(x, self.place))


class Noted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))
        for place, block in enumerate(self.blocks):
            block.place = place  # type: ignore[assignment]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x, notes = self.lift(features), Notes()
        for block in self.blocks:
            x = block(x, notes)
        assert [slot.count for slot in notes.slots] == [1, 1, 1]
        return self.leave(x).squeeze(-1) + notes.by_name["block 1"].mean()


def trained_plainly(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """On the halves of each batch, as ranks see them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(step)
        halves = [loss_of(model, x[part], y[part]) for part in (slice(0, 2), slice(2, 4))]
        (sum(halves) / 2).backward()
        optimizer.step()
    return model.state_dict()


def an_object_that_blocks_change(strategy, offload):
    engine = start(
        strategy,
        model=models.fill(Noted()),
        activations={"checkpoint": "unit"},
        offload={"activations": offload},
    )
    for step in range(2):
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_object_that_blocks_change(strategy, offload, pools):
    state = pools(2).run(an_object_that_blocks_change, strategy, offload)[0]
    assert_close(state, trained_plainly(models.fill(Noted()), 2))


class Writing(zoo.Mlp):
    def forward(self, x: torch.Tensor, notes: Slot) -> torch.Tensor:  # type: ignore[override]
        notes.seen.add_(1)
        return super().forward(x) * notes.seen


class Written(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writing() for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x, notes = self.lift(features), Slot()
        notes.seen = torch.zeros(())
        for block in self.blocks:
            x = block(x, notes)
        return self.leave(x).squeeze(-1)


def test_a_tensor_in_an_object_that_a_block_writes_to_is_refused():
    import penstock  # noqa: PLC0415

    config = {"strategy": "ddp", "activations": {"checkpoint": "unit"}}
    engine = penstock.initialize(models.fill(Written()), config)
    with pytest.raises(penstock.RuntimeFault, match=r'"blocks.0" wrote in place .* \(in a Slot\)'):
        engine(data(0)[0])
    with torch.no_grad():
        engine(data(0)[0])
    engine.close()


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Parametrized(zoo.Mlp):
    """Puts a parametrization on in each forward, and takes it off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.up, "weight", Twice())
        try:  # a recomputation ends early
            with parametrize.cached():
                return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


class Inside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Parametrized() for _ in range(3)))


def a_parametrization_inside_a_forward(checkpoint):
    engine = start("zero3", model=models.fill(Inside()), activations={"checkpoint": checkpoint})
    for step in range(3):
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("checkpoint", ["none", "unit"])
def test_a_parametrization_inside_a_forward(checkpoint, pools):
    state = pools(2).run(a_parametrization_inside_a_forward, checkpoint)[0]
    assert_close(state, trained_plainly(models.fill(Inside()), 3))


class Clamped(Parametrized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


def an_edit_beside_a_parametrization():
    model = models.fill(Inside())
    model.blocks[1].__class__ = Clamped
    engine = start("zero3", model=model)
    try:
        engine(mine(0)[0])
    finally:
        engine.close()


def test_an_edit_beside_a_parametrization_is_an_error(pools):
    for failure in pools(2).attempt(an_edit_beside_a_parametrization):
        assert isinstance(failure, Failure) and "changed in place" in failure.text


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_parameter_that_came_frozen_and_trains_later_is_an_error(strategy):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(models.fill(Net()), {"strategy": strategy, "optimizer": SGD})
    engine.module.later = nn.Linear(FEATURES, 1).requires_grad_(False)
    for step in range(2):
        engine.backward(loss_of(engine, *data(step)))
        engine.step()
    engine.module.later.requires_grad_()
    with pytest.raises(penstock.RuntimeFault, match=r'"later.weight" was added after initialize'):
        engine(data(0)[0])
    engine.close()


class Speaks(nn.Module):
    """A tied head in tiles; says as many tokens as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens)))

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def different_lengths_before_training():
    tiling = {"max_bytes": 512, "loss_tokens": 4}
    engine = start("zero3", model=models.fill(Speaks()), tiling=tiling)
    with torch.no_grad():
        engine.generate(torch.tensor([[1, 2]]), 2)
        engine.generate(torch.tensor([[1, 2]]), 1 + dist.get_rank())


def test_different_lengths_before_training(pools):
    for failure in pools(2).attempt(different_lengths_before_training):
        assert isinstance(failure, Failure) and "run that step first" in failure.text


def chunked_logits_at_different_lengths(rank_counts: tuple[int, ...]) -> Any:
    engine = start(
        "zero3", model=models.fill(Speaks()), tiling={"max_bytes": 512, "loss_tokens": 4}
    )
    tokens = torch.tensor([[1, 2]])
    engine.backward(nn.functional.cross_entropy(engine(tokens).view(-1, 64), tokens.view(-1)))
    engine.step()
    with torch.no_grad():
        said = engine.generate(torch.tensor([[1, 2]]), rank_counts[dist.get_rank()])
    state = engine.state_dict(rank0_only=False)
    engine.close()
    return said, state


def test_chunked_logits_at_different_lengths(pools):
    counts = (1, 4)
    outcome = pools(2).run(chunked_logits_at_different_lengths, counts)
    model = Speaks()
    for (said, state), count in zip(outcome, counts, strict=True):
        model.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(said, model.generate(torch.tensor([[1, 2]]), count))
