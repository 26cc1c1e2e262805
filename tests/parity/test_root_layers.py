"""Embeddings and heads that are units of their own, in every way that models use them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import compare
import layer_models
import models
import pytest
import training
import zoo
from ranks import Failure
from training import Case


@pytest.mark.parametrize("model", zoo.LAYERED)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "hpz"])
def test_trains_like_plain_torch(strategy, precision, world, model, pools, largest):
    compare.assert_parity(Case(strategy, precision, world=world, model=model), pools, largest)


@pytest.mark.parametrize("model", ["called", "read", "twice", "left_out"])
def test_four_ranks_and_several_backwards(model, pools, largest):
    compare.assert_parity(Case("hpz", accumulate=3, world=4, model=model), pools, largest)


def test_ranks_that_leave_layers_out_of_order_keep_them_in_the_root(pools, largest):
    for outcome in pools(2).attempt(train_impatiently, Case(model="unordered")):
        assert isinstance(outcome, Failure) and outcome.is_a("RuntimeFault")
        assert "head" in outcome.text and "adapter" in outcome.text
    compare.assert_parity(Case(model="unordered_in_root"), pools, largest)


def train_impatiently(case):
    training.train(case, comm={"timeout_s": 8})


@dataclass
class Seen:
    """What one rank saw of two steps."""

    losses: list[float] = field(default_factory=list)
    whole: list[set[str]] = field(default_factory=list)  # outside of blocks, after each block
    units: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    off_plan: list[int] = field(default_factory=list)  # events so far, after each step
    explained: str = ""
    backward: str = ""  # its plan
    ledger: dict[str, Any] = field(default_factory=dict)


def is_whole(parameter):
    try:
        parameter.detach().sum()
    except RuntimeError:  # freed
        return False
    return True


def see(kind, others, sharded=False) -> Seen:
    """On a rank: two steps, each unit moved by itself and in time; `whole` is of the second."""
    import penstock  # noqa: PLC0415

    with penstock.init() if sharded else contextlib.nullcontext():
        model = models.fill(getattr(layer_models, kind)())
    alone = {"prefetch_bytes": 0, "comm": {"timeout_s": 60, "bucket_bytes": 0}}
    engine = penstock.initialize(model, Case(model="called").config() | alone | others)
    seen = Seen()
    for batch in zoo.batches("called", 2 * training.MICRO)[:2]:
        seen.losses.append(training.backwards(engine, batch, 1))
        engine.step()
        told = re.search(r"events off plan so far: (\d+)", engine.explain())
        seen.off_plan.append(int(told.group(1)))
        for block in model.blocks if not seen.whole else ():
            block.register_forward_hook(
                lambda *_: seen.whole.append(
                    {n for n, p in model.named_parameters() if "blocks" not in n and is_whole(p)}
                )
            )
    units = engine._core.units
    seen.units = [unit.module for unit in units]
    seen.recomputed = [unit.module for unit in units if unit.recomputed]
    seen.explained, seen.ledger = engine.explain(), engine.ledger()
    seen.backward = engine._core.plan_text("backward_last")
    engine.close()
    return seen


NORM = {"norm.weight", "norm.bias"}


def test_they_are_there_only_while_they_run(pools):
    seen = pools(2).run(see, "Untied", {})[0]
    assert seen.units == ["", "tokens", "places", "blocks.0", "blocks.1", "head"]
    assert seen.whole == [NORM, NORM]
    assert "units read outside their module: 0\nevents off plan so far: 0\n" in seen.explained


GATHERED = {
    "Untied": {"u0", "u3", "u4", "u5"},  # not the embeddings
    "Hooked": {"u0", "u1", "u3", "u4", "u5"},
    "Frozen": {"u0", "u3", "u4", "u5"},
    "NoGrad": {"u0", "u3", "u4", "u5"},
}


@pytest.mark.parametrize("kind", GATHERED)
def test_embeddings_need_no_weights_in_backward(kind, pools):
    seen = pools(2).run(see, kind, {})[0]
    assert set(re.findall(r"^move (u\d) param all_gather", seen.backward, re.M)) == GATHERED[kind]


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("Read", {"tokens.weight"}),
        ("FrozenRead", {"tokens.weight"}),
        ("Twice", {"tokens.weight", "places.weight", "head.weight", "head.bias"}),
    ],
)
def test_what_is_used_here_and_there_stays(kind, also, pools):
    seen = pools(2).run(see, kind, {})[0]
    assert seen.whole == [NORM | also] * 2
    assert seen.off_plan[0] == seen.off_plan[1] > 0
    foreseen, measured = seen.ledger["predicted"]["zero3"], seen.ledger["measured"]
    assert measured["grad"] <= foreseen["grad"]  # in step one, too


def test_they_take_less_memory_as_foreseen(pools):
    own, in_root = (
        pools(2).run(see, "Untied", {"units": units})[0]
        for units in ({"layer_bytes": 1000}, {"layer_bytes": 1 << 30})
    )
    assert in_root.units == ["", "blocks.0", "blocks.1"]
    assert own.losses == in_root.losses
    for seen in (own, in_root):
        foreseen, measured = seen.ledger["predicted"]["zero3"], seen.ledger["measured"]
        assert foreseen["total"] == pytest.approx(measured["total"], rel=0.1)
    assert own.ledger["measured"]["total"] < in_root.ledger["measured"]["total"]


@pytest.mark.parametrize(("every", "blocks"), [("unit", [0, 1]), (2, [0])])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_only_blocks_are_computed_again(strategy, every, blocks, pools):
    usual = pools(2).run(see, "Untied", {"strategy": strategy})[0]
    seen = pools(2).run(
        see, "Untied", {"strategy": strategy, "activations": {"checkpoint": every}}
    )[0]
    assert seen.recomputed == [f"blocks.{block}" for block in blocks]
    assert seen.losses == usual.losses


def test_built_under_init(pools):
    usual, sharded = (pools(2).run(see, "Untied", {}, how)[0] for how in (False, True))
    assert sharded.units == usual.units
    assert sharded.losses == usual.losses


def test_in_tiles_they_are_no_units_besides(pools):
    seen = pools(2).run(see, "Untied", {"tiling": {"max_bytes": 4096}})[0]
    assert "head" not in seen.units and "tokens" not in seen.units
    assert any(re.match(r"head.weight\[0:\d+\]", name) for name in seen.units)
    usual = pools(2).run(see, "Untied", {})[0]
    assert compare.relative(seen.losses, usual.losses) <= compare.SCALAR_LIMIT
