"""At the border with users' code: what one rank alone does to weights or to its window is an error
on all ranks at the next step, or has no effect.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import types

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import (
    assert_close,
    build,
    data,
    every_precision,
    every_strategy,
    mine,
    plain,
    start,
)
from test_border import loss_of as loss_in_dtype
from test_border_windows import Probed

NAME = "blocks.1.up.weight"


def weight(engine):
    return engine.module.get_parameter(NAME)


# ---- weights edited on one rank


def _no_grad(engine):
    with torch.no_grad():
        weight(engine).mul_(0.5)


def _rows(engine):
    weight(engine).data[:, 1].zero_()


def _data(engine):
    weight(engine).data.mul_(0.5)


def _replaced(engine):
    p = weight(engine)
    p.data = torch.ones(p.shape, dtype=p.dtype)


def _loaded(engine):
    state = {name: value + 1 for name, value in build().state_dict().items()}
    engine.module.load_state_dict(state)


EDITS = {"no_grad": _no_grad, "data": _data, "rows": _rows, "replaced": _replaced}
LOADS = {"loaded": _loaded}


def train(engine, steps):
    for step in steps:
        engine.backward(loss_in_dtype(engine, *mine(step)))
        engine.step()


def edited_alone(strategy, precision, edit, rank):
    engine = start(strategy, precision)
    train(engine, [0])
    if dist.get_rank() == rank:
        (EDITS | LOADS)[edit](engine)
    said = []
    for _ in range(2):  # nothing was mended in between
        with pytest.raises(RuntimeError) as error:
            train(engine, [1])
        said.append(str(error.value))
    with engine.gathered(write=True):
        pass  # the first rank's values, on all ranks
    train(engine, [1])
    engine.close()
    return said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("edit", [*EDITS, *LOADS])
@every_precision
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_edited_alone(strategy, precision, edit, rank, pools):
    name = "lift.weight" if edit in LOADS else NAME
    for said in pools(2).run(edited_alone, strategy, precision, edit, rank):
        for text in said:
            assert f'parameter "{name}" has different values on rank 1 and rank 0' in text


@pytest.mark.parametrize("rank", [0, 1])
def test_edited_alone_where_it_is_sharded(rank, pools):
    for said in pools(2).run(edited_alone, "zero3", "fp32", "replaced", rank):
        assert all(f'parameter "{NAME}" has different values on rank 1' in text for text in said)


def frozen_edited_alone(strategy):
    model = build()
    model.blocks[1].requires_grad_(False)
    engine = start(strategy, model=model)
    train(engine, [0])
    if dist.get_rank() == 1:
        _data(engine)
    train(engine, [1])


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_frozen_edited_alone(strategy, pools):
    for failure in pools(2).attempt(frozen_edited_alone, strategy):
        assert (
            isinstance(failure, Failure)
            and f'parameter "{NAME}" has different values' in failure.text
        )


def put_back(strategy, precision, how):
    """Rank 0 swaps weights for an evaluation of its own and puts them back."""
    engine = start(strategy, precision)
    train(engine, [0])
    if dist.get_rank() == 0:
        p = weight(engine)
        kept, old = p.detach().clone(), p.data
        if how == "in place":
            with torch.no_grad():
                p.mul_(0.5)
                p.copy_(kept)
        else:
            p.data = kept * 2
            p.data = old
    train(engine, [1])
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("how", ["in place", "replaced"])
@every_precision
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_put_back(strategy, precision, how, pools):
    state = pools(2).run(put_back, strategy, precision, how)[0]
    assert_close(state, plain([0, 1]), precision)


def edited_alike(strategy, edit):
    engine = start(strategy)
    counts = []
    for step in range(3):
        if step == 1:
            EDITS[edit](engine)
        train(engine, [step])
        counts.append(engine.ledger()["measured"]["exchanges"])
    state = engine.state_dict()
    engine.close()
    return state, counts


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_edited_alike(strategy, edit, pools):
    """The same edit on all ranks is as in torch, and costs no exchange."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        if step == 1:
            EDITS[edit](types.SimpleNamespace(module=model))
        optimizer.zero_grad()
        loss_in_dtype(model, *data(step)).backward()
        optimizer.step()
    for state, counts in pools(2).run(edited_alike, strategy, edit):
        assert counts[1] == counts[2] > 0
        if state:
            assert_close(state, model.state_dict())


# ---- windows


def backward(engine, step, **kwargs):
    loss = ((engine(mine(step)[0]) - mine(step)[1]) ** 2).mean()
    engine.backward(loss, **kwargs)
    return loss


def one_more(strategy, accumulate, what, rank):
    engine = start(strategy, batch={"accumulate": accumulate}, comm={"timeout_s": 60})
    said = ""
    for step in range(3):
        try:
            for micro in range(accumulate):
                loss = backward(engine, step + micro, retain_graph=True)
            if dist.get_rank() == rank and step == 1:
                if what == "backward":
                    engine.backward(loss)
                else:
                    backward(engine, step)
            del loss
            engine.step()
        except RuntimeError as error:
            said += str(error)
    state = engine.state_dict()
    engine.close()
    return said, state


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["backward", "forward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@every_strategy
def test_one_more(strategy, accumulate, what, rank, pools):
    """A backward or a forward after the window's last backward, on one rank only, ends at once on
    all ranks; the window is dropped and the next one trains."""
    outcome = pools(2).run(one_more, strategy, accumulate, what, rank, timeout=180)
    begun = "forward" if what == "forward" and strategy == "zero3" else "backward"
    for said, _ in outcome:
        assert said.count("after the last backward of the accumulation window") == 1
        assert f"rank {1 - rank} called step()" in said
        assert f"rank {rank} began another {begun}" in said
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (0, 2):
        for micro in range(accumulate):
            x, y = data(step + micro)
            (((model(x) - y) ** 2).mean() / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(outcome[0][1], model.state_dict())


def one_more_on_all(strategy):
    engine = start(strategy)
    for step in range(2):
        backward(engine, step)
        backward(engine, step + 1)
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_one_more_on_all(strategy, pools):
    state = pools(2).run(one_more_on_all, strategy)[0]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        for one in (step, step + 1):
            x, y = data(one)
            ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(state, model.state_dict())


# ---- backwards that reach nothing that trains


def _leaf(_engine, _x):
    return torch.ones((), requires_grad=True) * 2


def _cut_off(engine, x):
    return engine(x)[0].detach().sum() * torch.ones((), requires_grad=True)


def _frozen(engine, x):
    return (engine(x.clone().requires_grad_())[1] ** 2).sum()


def _without_grad(engine, x):
    return engine(x)[0].detach().sum()


EMPTY = {"leaf": _leaf, "cut off": _cut_off, "frozen": _frozen, "without grad": _without_grad}

REFUSED = {"without grad": "does not require grad", "leaf": "without a forward"}


def reaches_nothing(strategy, what, order):
    engine = start(strategy, model=models.fill(Probed()), batch={"accumulate": 2})
    applied = []
    for step, kind in enumerate(order):
        x, y = mine(step)
        if kind == "R":
            engine.backward(((engine(x)[0] - y) ** 2).mean())
        else:
            try:
                engine.backward(EMPTY[what](engine, x))
            except RuntimeError as error:
                assert REFUSED[what] in str(error)
        try:
            applied.append(engine.step())
        except RuntimeError as error:
            assert "no backward has reached" in str(error)
            applied.append(None)
    engine.close()
    return applied


@pytest.mark.parametrize("order", ["RERRER", "ERRERR"])
@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_reaches_nothing(strategy, what, order, pools):
    """Such a backward does not count in the window of two."""
    seen, expected = 0, []
    for kind in order:
        seen += kind == "R"
        expected.append(kind == "R" and seen % 2 == 0)
    for applied in pools(2).run(reaches_nothing, strategy, what, order):
        assert [bool(one) for one in applied] == expected
