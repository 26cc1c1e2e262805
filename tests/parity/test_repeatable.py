"""Repeatable: with a seed two runs give the same bits, and what only moves data changes none.

Strategies give the same bits where they add up in the same order. With one micro-batch a window
ddp and zero1-3 do. With more, ddp and zero1 add up a rank's micro-batches first and the ranks last,
zero2 and zero3 the other way round: the same bits within each pair. hpz and mics add up inside a
node first.
"""

from __future__ import annotations

import cases
import models
import pytest
import torch
import training
from training import Case, Run

EVERY = [*cases.STRATEGIES, *cases.NODE_STRATEGIES]
STEPS = 6


class Dropping(models.Gpt):
    """Drops a part of what each block adds."""

    def __init__(self, recompute="off"):
        super().__init__(recompute)
        for block in self.blocks:
            block.down = torch.nn.Sequential(block.down, torch.nn.Dropout(0.2))


def train(case, others=None, model=Dropping) -> Run:
    """On a rank: a few steps, with weights that come from the seed of the caller's generator."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    engine = penstock.initialize(
        model(case.recompute), case.config() | {"seed": 5} | (others or {})
    )
    run = Run()
    for batch in models.batches(case.model, STEPS, case.samples):
        run.losses.append(training.backwards(engine, batch, case.accumulate))
        engine.step()
        run.norms.append(engine.grad_norm)
    run.weights = engine.state_dict()
    engine.close()
    return run


def runs(pools, case, *args) -> list[Run]:
    return pools(case.world).run(train, case, *args)


@pytest.fixture(scope="module")
def usual(pools):
    """usual(case) is what a case gives, run once."""
    done: dict[Case, list[Run]] = {}

    def of(case):
        if case not in done:
            done[case] = runs(pools, case)
        return done[case]

    return of


def assert_same_training(ours, theirs):
    """The same bits in the losses of every rank and in the weights."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == other.losses
        assert set(mine.weights) == set(other.weights)
        assert all(mine.weights[name].equal(other.weights[name]) for name in other.weights)


def assert_same_bits(ours, theirs):
    assert_same_training(ours, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.norms == other.norms


def case_of(strategy, **others) -> Case:
    world = 4 if strategy in cases.NODE_STRATEGIES else 2
    return Case(strategy, **{"world": world, "clip": True} | others)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", EVERY)
def test_two_runs(strategy, precision, pools, usual):
    case = case_of(strategy, precision=precision, accumulate=2)
    first = usual(case)
    assert_same_bits(runs(pools, case), first)
    assert first[0].losses[0] != first[1].losses[0], "ranks have the same data or dropout"


@pytest.mark.parametrize("strategy", EVERY)
def test_seed_reaches_dropout(strategy, pools, usual):
    case = case_of(strategy, accumulate=2)
    assert runs(pools, case, {"seed": 6})[0].losses[0] != usual(case)[0].losses[0]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_strategies_give_the_same_bits(strategy, world, usual):
    ours = usual(case_of(strategy, world=world))
    assert_same_bits(ours, usual(case_of("ddp", world=world)))


@pytest.mark.parametrize(("strategy", "like"), [("zero1", "ddp"), ("zero3", "zero2")])
def test_strategies_give_the_same_bits_with_accumulation(strategy, like, usual):
    ours = usual(case_of(strategy, accumulate=2))
    assert_same_bits(ours, usual(case_of(like, accumulate=2)))


MOVES = {
    "no prefetch": {"prefetch_bytes": 0},
    "prefetch all": {"prefetch_bytes": 1 << 40},
    "no buckets": {"comm": {"timeout_s": 120, "bucket_bytes": 0}},
    "one bucket": {"comm": {"timeout_s": 120, "bucket_bytes": 1 << 40}},
}
UNITS = {
    "large": {"units": {"modules": ["ModuleList"]}},
    "small": {"units": {"modules": ["LayerNorm", "Linear"]}},
}


@pytest.mark.parametrize("setting", MOVES)
@pytest.mark.parametrize("strategy", EVERY)
def test_moves_change_no_bits(strategy, setting, pools, usual):
    case = case_of(strategy, accumulate=2)
    assert_same_bits(runs(pools, case, MOVES[setting]), usual(case))


@pytest.mark.parametrize("size", UNITS)
@pytest.mark.parametrize("strategy", EVERY)
def test_units_change_no_bits_of_the_training(strategy, size, pools, usual):
    """The norm is a sum over units in fp64, of which the last bits may differ."""
    case = case_of(strategy, accumulate=2, clip=False)
    ours = runs(pools, case, UNITS[size])
    assert_same_training(ours, usual(case))
    assert ours[0].norms == pytest.approx(usual(case)[0].norms, rel=1e-14)


@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("strategy", EVERY)
def test_checkpointing_changes_no_bits(strategy, recompute, usual):
    assert_same_bits(usual(case_of(strategy, recompute=recompute)), usual(case_of(strategy)))
