"""The plan drives the training: leave one kind of line out after step one, on all ranks, and the
run must fail or end with other weights. A gather alone is then made by the unit's event."""

from __future__ import annotations

import re

import compare
import models
import pytest
import training
from ranks import Failure
from training import Case, Run

SECTIONS = [
    *("forward", "forward_next", "eval"),
    *("backward", "backward_last", "update", "update_early"),
]

# Name of the kind: strategy, precision, backwards per step, section, what its lines look like. No
# line of a kind takes part in another kind.
KINDS = {
    "zero3 reduce-scatter": ("zero3", "fp32", 1, "backward_last", r"move .* grad reduce_scatter"),
    "zero3 publish cast": ("zero3", "bf16", 1, "update", r"publish .* param cast"),
    "zero3 update": ("zero3", "fp32", 1, "update", r"update "),
    "zero2 reduce-scatter": ("zero2", "fp32", 1, "backward_last", r"move .* grad reduce_scatter"),
    "zero2 publish gather": ("zero2", "fp32", 1, "update", r"publish .* param all_gather"),
    "zero1 reduce-scatter": ("zero1", "fp32", 2, "backward_last", r"move .* grad reduce_scatter"),
    "zero1 publish gather": ("zero1", "fp32", 1, "update", r"publish .* param all_gather"),
    "zero1 publish cast and gather": ("zero1", "bf16", 1, "update", r"publish .* param cast"),
    "ddp all-reduce": ("ddp", "fp32", 1, "backward_last", r"move .* grad all_reduce"),
    "ddp publish cast": ("ddp", "bf16", 1, "update", r"publish .* param cast"),
    "norm": ("zero3", "fp32", 1, "update", r"norm"),
}
GATHER = r"move .* param all_gather"


def off_plan_events(engine) -> int:
    return int(re.search(r"events off plan so far: (\d+)", engine.explain()).group(1))


def train_without(case: Case, section: str, pattern: str | None) -> tuple[Run, list[str], int]:
    """On a rank: `case` with the last line of `section` that matches left out after step one (none
    for pattern None); the run, the line, and the events off plan after that step."""
    import penstock  # noqa: PLC0415

    model = models.build(case.model)
    # Every unit's move is a line of its own.
    config = case.config() | {"comm": {"timeout_s": 8, "bucket_bytes": 0}}
    engine = penstock.initialize(model, config)
    run, removed, expected = Run(), [], 0
    try:
        for step, batch in enumerate(models.batches(case.model, training.STEPS, case.samples)):
            training.backwards(engine, batch, case.accumulate)
            engine.step()
            if step == 0 and pattern is not None:
                lines = engine._core.plan_text(section).splitlines()
                removed = [line for line in lines if re.match(pattern, line)][-1:]
                lines = [line for line in lines if line not in removed]
                engine._core.set_plan_text(section, "\n".join(lines) + "\n")
                expected = off_plan_events(engine)
        off_plan = off_plan_events(engine) - expected
        run.weights = engine.state_dict()
    finally:
        engine.close()
    return run, removed, off_plan


def plain_run(case: Case) -> Run:
    clip = training.CLIP[case.model] if case.clip else 0.0
    return training.reference(case.model, case.samples, clip)


@pytest.mark.parametrize("kind", KINDS)
def test_line_is_needed(kind, pools):
    strategy, precision, accumulate, section, pattern = KINDS[kind]
    case = Case(strategy, precision, accumulate, clip=True)
    outcomes = pools(2).attempt(train_without, case, section, pattern)
    if all(isinstance(outcome, Failure) for outcome in outcomes):
        for failure in outcomes:
            assert failure.is_a("Bug", "RuntimeFault"), failure.trace
        return
    run, removed, _ = outcomes[0]
    assert removed, f"the plan has no line like {pattern!r} in {section}"
    if precision == "fp32":
        assert compare.weight_deviation(run.weights, plain_run(case).weights) > 1e-4
        return
    (whole, *_), _ = pools(2).run(train_without, case, section, None)
    assert compare.weight_deviation(run.weights, whole.weights) > 1e-4


@pytest.mark.parametrize("section", ["forward", "backward_last"])
def test_what_no_line_gathers_is_gathered_on_demand(section, pools):
    case = Case("zero3", "fp32", 1, clip=True)
    run, removed, off_plan = pools(2).run(train_without, case, section, GATHER)[0]
    assert removed, f"the plan has no gather in {section}"
    assert off_plan == training.STEPS - 1  # each of them is seen
    assert compare.weight_deviation(run.weights, plain_run(case).weights) <= compare.WEIGHT_LIMIT


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_whole_plan_passes(strategy, pools):
    case = Case(strategy, accumulate=2, clip=True)
    run, *_ = pools(2).run(train_without, case, "forward", None)[0]
    deviation = compare.weight_deviation(run.weights, plain_run(case).weights)
    assert deviation <= compare.WEIGHT_LIMIT


def plan_texts(case: Case) -> dict[str, str]:
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(models.build(case.model), case.config())
    training.backwards(engine, models.batches(case.model, 1, case.samples)[0], case.accumulate)
    engine.step()
    texts = {section: engine._core.plan_text(section) for section in SECTIONS}
    for section, text in texts.items():
        engine._core.set_plan_text(section, text)
        assert engine._core.plan_text(section) == text
    engine.close()
    return texts


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_ranks_agree_on_the_plan(strategy, pools):
    first, second = pools(2).run(plan_texts, Case(strategy))
    assert first == second
