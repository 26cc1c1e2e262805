"""close() after an error: the weights come back on every rank that comes, or it says why not."""

from __future__ import annotations

import contextlib
import os

import models
import pytest
import torch
import torch.distributed as dist
import training
from ranks import Failure, Pool
from training import Case

# Long, so that a test that passes did not wait for it.
LONG_S, PATIENCE_S = 300, 100
RAISES = "this rank's data is bad"


def fail(*_):
    raise ValueError(RAISES)


def interrupt(*_):
    raise KeyboardInterrupt


def in_forward(block, raised=fail):
    def arm(engine):
        engine.module.blocks[block].register_forward_pre_hook(raised)

    return arm


def in_backward(engine):
    def watch(_module, _inputs, output):
        output.register_hook(fail)

    engine.module.blocks[1].register_forward_hook(watch)


def in_scheduler(engine):
    engine.lr_scheduler.step = fail


def in_step(engine):
    engine._external._step = fail


def never(engine):
    pass


# On each of two ranks.
FAULTS = {
    "forward, all": (in_forward(1), in_forward(1)),
    "forward, all, apart": (in_forward(0), in_forward(2)),
    "forward, one": (never, in_forward(1)),
    "forward, first": (in_forward(0), never),
    "interrupt": (never, in_forward(1, interrupt)),
    "backward, all": (in_backward, in_backward),
    "backward, one": (never, in_backward),
}


def start(strategy, timeout_s=LONG_S, **others):
    import penstock  # noqa: PLC0415

    config = Case(strategy).config() | {"comm": {"timeout_s": timeout_s}} | others
    return penstock.initialize(models.Gpt(), config)


def train(engine, steps):
    for batch in models.batches("gpt", steps, 2 * training.MICRO):
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()


def weights_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def try_and_close(engine, steps=4):
    """What a user's loop ends with."""
    try:
        try:
            train(engine, steps)
        finally:
            engine.close()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def suffer(name, strategy, others):
    torch.manual_seed(0)
    engine = start(strategy, **others)
    train(engine, 2)
    before = engine.state_dict(rank0_only=False)
    FAULTS[name][dist.get_rank()](engine)
    said = try_and_close(engine)
    after = weights_of(engine.module)
    assert all(after[name].equal(before[name]) for name in after), "these are other weights"
    return said


CASES = [(name, "zero3", {}) for name in FAULTS]
CASES += [("forward, one", strategy, {}) for strategy in ("hpz", "zero1")]
CASES += [("backward, one", "ddp", {}), ("forward, one", "zero3", {"tiling": {"max_bytes": 4096}})]


@pytest.mark.parametrize(("name", "strategy", "others"), CASES, ids=str)
def test_close_after_an_error_gives_the_weights_back(name, strategy, others, pools):
    outcomes = pools(2).run(suffer, name, strategy, others, timeout=PATIENCE_S)
    for rank, said in enumerate(outcomes):
        if FAULTS[name][rank] is not never:
            assert said in (f"ValueError: {RAISES}", "KeyboardInterrupt: ")
        else:
            assert said.startswith("RuntimeFault: ")
            assert f"rank {1 - rank}" in said
            assert RAISES in said or "KeyboardInterrupt" in said


def suffer_outside(name):
    """An error that the engine does not see: rank 1's loop ends in its own code."""
    torch.manual_seed(0)
    import penstock  # noqa: PLC0415

    model = models.Gpt()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"strategy": "zero3", "comm": {"timeout_s": LONG_S}, "units": {"modules": ["Block"]}}
    engine = penstock.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    train(engine, 2)
    said = "nothing"
    try:
        try:
            if dist.get_rank() == 1 and name == "data":
                fail()
            if dist.get_rank() == 1 and name == "scheduler":
                in_scheduler(engine)
            train(engine, 2)
        finally:
            engine.close()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, weights_of(model)


@pytest.mark.parametrize("name", ["data", "scheduler"])
def test_an_error_outside_of_the_engine(name, pools):
    outcomes = pools(2).run(suffer_outside, name, timeout=PATIENCE_S)
    (said, ours), (others_said, theirs) = outcomes
    assert said.startswith("RuntimeFault: ") and RAISES in said
    assert others_said == f"ValueError: {RAISES}"
    assert all(ours[name].equal(theirs[name]) for name in ours)


def suffer_in_step():
    import penstock  # noqa: PLC0415

    config = {"strategy": "zero3", "comm": {"timeout_s": LONG_S}}
    engine = penstock.initialize(
        models.Gpt(), config, optimizer=lambda params: torch.optim.RMSprop(params, lr=0.01)
    )
    train(engine, 2)
    if dist.get_rank() == 1:
        in_step(engine)
    with pytest.warns(RuntimeWarning, match="step 3, where its update raised ValueError"):
        said = try_and_close(engine)
    assert all(bool(value.isfinite().all()) for value in weights_of(engine.module).values())
    return said


def test_a_step_that_was_cut_short_is_said(pools):
    ours, theirs = pools(2).run(suffer_in_step, timeout=PATIENCE_S)
    assert ours.startswith("RuntimeFault: ") and RAISES in ours
    assert theirs == f"ValueError: {RAISES}"


def lose_rank_1(how):
    engine = start("zero3", timeout_s=8)
    train(engine, 2)
    if dist.get_rank() == 1 and how == "dies":
        os._exit(0)
    if dist.get_rank() == 1 and how == "stays away":
        dist.barrier()
        return "away"
    with contextlib.ExitStack() as stack:
        if how == "stays away":
            stack.callback(dist.barrier)
        said = try_and_close(engine)
    kept = engine.module.blocks[0].up.weight
    with pytest.raises(RuntimeError, match='blocks.0.up.weight" has no values'):
        kept.sum()
    return said


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_close_says_that_the_weights_are_lost(how):
    pool = Pool(2)
    try:
        pool.start(lose_rank_1, how)
        said = pool.outcomes({0}, PATIENCE_S)[0]
        assert not isinstance(said, Failure), said.trace
        assert said.startswith("RuntimeFault: [engine::close] the weights could not be gathered")
        assert "rank 1" in said
    finally:
        pool.kill()


def goes_on():
    """A loop may go on after an error on every rank, and then close as ever."""
    engine = start("zero3")
    train(engine, 1)
    handle = engine.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match=RAISES):
        train(engine, 1)
    handle.remove()
    train(engine, 2)
    expected = engine.state_dict(rank0_only=False)
    engine.close()
    after = weights_of(engine.module)
    return all(after[name].equal(expected[name]) for name in after)


def test_a_loop_that_goes_on_closes_as_ever(pools):
    assert pools(2).run(goes_on) == [True, True]
