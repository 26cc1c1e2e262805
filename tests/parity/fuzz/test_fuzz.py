"""Random models, loops, optimizers and strategies against plain torch in one process.

`pytest tests/parity/fuzz` runs 40 seeds, `pytest tests/parity/fuzz --seeds 0-500` as many as one
likes. A failure prints its case and the command that runs it again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import compare
import fuzz_cases
import fuzz_loop
import fuzz_models
import pytest
from training import Run

DAILY = "0-39"
# Lion moves by the sign of a sum: one that is as good as zero may round to either side. Of the way
# that the weights went.
LION_LIMIT = 0.1


def seeds(text: str) -> list[int]:
    """Of "7", "0-500" or "3,8,10-19"."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def pytest_generate_tests(metafunc):
    metafunc.parametrize("seed", seeds(metafunc.config.getoption("seeds") or DAILY))


def merged(runs: list[Run]) -> Run:
    """The ranks' runs as one: the mean of their losses."""
    assert all(run.norms == runs[0].norms for run in runs), "ranks differ in grad_norm"
    assert all(not run.weights for run in runs[1:]), "state_dict() is not empty elsewhere"
    by_call = zip(*(run.losses for run in runs), strict=True)
    return dataclasses.replace(runs[0], losses=[sum(losses) / len(runs) for losses in by_call])


def check(case: fuzz_cases.Case, pools: Any, largest: dict[str, float]) -> None:
    outcomes = pools(case.world).run(fuzz_loop.train, case)
    assert len({digest for _, digest in outcomes}) == 1, "ranks hold different models after close()"
    ours, plain = merged([run for run, _ in outcomes]), fuzz_loop.plain(case)
    parameters = fuzz_models.build(case.shape, case.seed).named_parameters()
    start = {name: param.detach() for name, param in parameters if param.requires_grad}
    if case.precision == "fp32":
        limits = dict(compare.FP32_LIMITS)
        deviations = compare.fp32_deviations(ours, plain)
    else:
        exact = fuzz_loop.plain(dataclasses.replace(case, precision="fp32"))
        own = compare.bf16_deviations(plain, exact, start)
        limits = {n: compare.BF16_RATIO * d + compare.BF16_SLACK[n] for n, d in own.items()}
        deviations = compare.bf16_deviations(ours, exact, start)
    if case.optimizer == "Lion":
        deviations["weights"] = compare.change_deviation(ours.weights, plain.weights, start)
        limits["weights"] = LION_LIMIT
    key = "Lion" if case.optimizer == "Lion" else case.precision
    compare.check(largest, f"fuzz {key}", limits, deviations)


def test_fuzz(seed, pools, largest):
    case = fuzz_cases.make(seed)
    try:
        check(case, pools, largest)
    except AssertionError as error:
        command = f"pytest tests/parity/fuzz --seeds {seed}"
        pytest.fail(f"{error}\nseed {seed}, again by: {command}\n{case}", pytrace=False)
