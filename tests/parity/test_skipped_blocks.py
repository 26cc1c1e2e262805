"""Ranks skip different blocks, in any order of steps, forwards and backwards: as plain torch."""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import SGD, Net, assert_close, data, every_strategy, loss_of, mine, start

# The blocks that rank 0 and rank 1 skip in each forward before a backward.
FORWARDS = {
    "the second": [({1}, set()), (set(), {1})],
    "two": [({1, 2}, {0}), ({1}, {0, 2})],
    "all": [({0, 1, 2}, set()), (set(), {0, 1, 2}), (set(), set())],
    "later": [(set(), set()), ({2}, {1})],
    "apart": [({0, 1}, set()), ({0, 2}, set())],
    "apart-on-both": [({0, 1}, {0, 2}), ({0, 2}, {0, 1})],
    "never-at-first": [({1}, {1}), ({1, 2}, {0, 1})],
}


class Leaves(Net):
    """Skips the blocks in `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.out: set[int] = set()
        for number, block in enumerate(self.blocks):
            block.forward = self._skipped(number, block.forward)

    def _skipped(self, number, inner):
        return lambda x: x if number in self.out else inner(x)


def loss_of_forwards(run, model, rank, x, y, out):
    total = 0.0
    for ranks in out:
        model.out = ranks[rank]
        total = total + loss_of(run, x, y)
    return total


def several_forwards(strategy, out, equal_first):
    model = models.fill(Leaves())
    engine = start(strategy, model=model, comm={"timeout_s": 120})
    for step in range(4):
        shown = [(set(), set())] * (step + 1) if equal_first and step < 1 else out
        engine.backward(loss_of_forwards(engine, model, dist.get_rank(), *mine(step), shown))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize(
    ("out", "equal_first"),
    [*((out, False) for out in FORWARDS.values()), (FORWARDS["all"], True)],
    ids=[*FORWARDS, "all-after-a-step"],
)
@every_strategy
def test_ranks_skip_blocks_in_several_forwards_before_a_backward(strategy, out, equal_first, pools):
    state = pools(2).run(several_forwards, strategy, out, equal_first)[0]
    model = models.fill(Leaves())
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step)
        shown = [(set(), set())] * (step + 1) if equal_first and step < 1 else out
        for rank in range(2):
            rows = slice(2 * rank, 2 * rank + 2)
            (loss_of_forwards(model, model, rank, x[rows], y[rows], shown) / 2).backward()
        optimizer.step()
    assert_close(state, model.state_dict())


def test_other_orders_after_a_step_that_had_one_forward_are_refused(pools):
    for failure in pools(2).attempt(several_forwards, "zero3", FORWARDS["later"], True):
        assert isinstance(failure, Failure), failure
        assert "off plan` (both" in failure.text and 'or use "zero2"' in failure.text


# Blocks that rank 0 and rank 1 run in each forward, by step: two forwards before a backward.
TWICE = {
    "missing": [[("02", "02"), ("02", "0")], [("1", "02"), ("02", "02")]],
    "more": [[("0", "1"), ("1", "0")], [("012", "2"), ("", "012")]],
    "after-both": [[("012", "012")] * 2, [("2", "1"), ("1", "02")]],
    "after-all": [[("012", "012")] * 2, [("2", "2"), ("1", "0")], [("01", ""), ("2", "012")]],
}


def runs_of_blocks(strategy, steps, unused):
    model = models.fill(Leaves())
    engine = start(strategy, model=model, comm={"timeout_s": 120})
    if unused:  # graphs that no backward follows
        for _ in range(2):
            engine(mine(0)[0])
    for step, runs in enumerate(steps):
        total = 0.0
        for ranks in runs:
            model.out = {0, 1, 2} - set(map(int, ranks[dist.get_rank()]))
            total = total + loss_of(engine, *mine(step))
        engine.backward(total)
        engine.step()
    state, plan = engine.state_dict(), engine._core.plan_text("backward")
    engine.close()
    return state, plan


def plain_runs_of_blocks(steps, accumulate=1):
    """Weights of plain torch on the batches of both ranks."""
    model = models.fill(Leaves())
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step, runs in enumerate(steps):
        optimizer.zero_grad()
        x, y = data(step)
        for ranks in runs:
            for rank in range(2):
                model.out = {0, 1, 2} - set(map(int, ranks[rank]))
                rows = slice(2 * rank, 2 * rank + 2)
                (loss_of(model, x[rows], y[rows]) / 2 / accumulate).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("steps", TWICE.values(), ids=TWICE)
@every_strategy
def test_two_forwards_with_blocks_that_step_one_did_not_run(strategy, steps, pools):
    state, _ = pools(2).run(runs_of_blocks, strategy, steps, False)[0]
    assert_close(state, plain_runs_of_blocks(steps))


def test_graphs_that_no_backward_follows_change_no_plan(pools):
    """Units are dropped one by one, as without the forwards before the loop."""
    steps = [[("0", "1")], [("12", "0")]]
    state, plan = pools(2).run(runs_of_blocks, "zero3", steps, True)[0]
    assert_close(state, plain_runs_of_blocks(steps))
    assert plan == pools(2).run(runs_of_blocks, "zero3", steps, False)[0][1]
    assert "begin" not in plan.replace("u0 begin", "")


# Blocks that rank 0 and rank 1 run, by step and micro-batch. Step one does not run all of them.
RUNS = {
    "one-rank-more": [[("0", "0")], [("0", "01")], [("0", "012")]],
    "others": [[("01", "01")], [("01", "012")], [("12", "2")]],
    "first-runs-last": [[("2", "2")], [("2", "02")], [("12", "01")]],
    "none-at-first": [[("", "")], [("1", "")], [("", "012")]],
    "micro-batches": [[("12", "12")] * 2, [("0", "0"), ("12", "02")], [("0", "1"), ("2", "01")]],
    "disagree": [[("0", "1")], [("12", "0")], [("", "2")]],
}


def blocks_that_step_one_did_not_run(strategy, steps):
    model = models.fill(Leaves())
    batch = {"accumulate": len(steps[0])}
    engine = start(strategy, model=model, batch=batch, comm={"timeout_s": 120})
    for step, runs in enumerate(steps):
        for ranks in runs:
            model.out = {0, 1, 2} - set(map(int, ranks[dist.get_rank()]))
            engine.backward(loss_of(engine, *mine(step)))
            engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("steps", RUNS.values(), ids=RUNS)
@every_strategy
def test_blocks_that_step_one_did_not_run(strategy, steps, pools):
    state = pools(2).run(blocks_that_step_one_did_not_run, strategy, steps)[0]
    assert_close(state, plain_runs_of_blocks(steps, accumulate=len(steps[0])))
