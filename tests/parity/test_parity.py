"""Layout does not change the answer: every strategy against plain torch in one process.

`pytest tests/parity` runs a sample, `pytest tests/parity --full` the whole matrix (cases.py).
"""

from __future__ import annotations

import cases
import compare
import pytest
import training


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = cases.matrix() if metafunc.config.getoption("full") else cases.sample()
        metafunc.parametrize("case", chosen, ids=str)


@pytest.fixture(scope="session")
def largest(request):
    """The largest deviations of the session by name, printed at its end (conftest.py)."""
    found: dict[str, float] = {}
    request.config.stash[request.config.parity_key] = found
    return found


def check(largest, key, limits, deviations):
    for name, deviation in deviations.items():
        largest[f"{key} {name}"] = max(largest.get(f"{key} {name}", 0.0), deviation)
    beyond = {n: (d, limits[n]) for n, d in deviations.items() if not d <= limits[n]}
    assert not beyond, f"(deviation, limit): {beyond}; all: {deviations}"


FP32_LIMITS = {
    "gradients": compare.GRADIENT_LIMIT,
    "weights": compare.WEIGHT_LIMIT,
    "losses": compare.SCALAR_LIMIT,
    "norms": compare.SCALAR_LIMIT,
}


def test_parity(case, pools, largest):
    clip = training.CLIP[case.model] if case.clip else 0.0
    plain = training.reference(case.model, case.samples, clip)
    assert not case.clip or min(plain.norms[:5]) > clip, "the case does not clip"
    outcomes = pools(case.world).run(training.train, case)
    runs = [run for run, _ in outcomes]
    assert len({digest for _, digest in outcomes}) == 1, "ranks hold different models after close()"
    assert all(run.norms == runs[0].norms for run in runs), "ranks differ in grad_norm"
    assert all(not run.weights for run in runs[1:]), "state_dict() is not empty elsewhere"
    ours = runs[0]
    by_step = zip(*(run.losses for run in runs), strict=True)
    ours.losses = [sum(losses) / case.world for losses in by_step]
    for name, tensor in training.initial_weights(case.model, trained=False).items():
        # Frozen parameters have no fp32 master.
        same = tensor if case.precision == "fp32" else tensor.bfloat16()
        assert ours.weights[name].equal(tensor) or ours.weights[name].equal(same.float()), name
    if case.precision == "fp32":
        check(largest, "fp32", FP32_LIMITS, compare.fp32_deviations(ours, plain))
        return
    theirs = training.reference(case.model, case.samples, clip, "bf16")
    start = training.initial_weights(case.model, trained=True)
    own = compare.bf16_deviations(theirs, plain, start)
    limits = {n: compare.BF16_RATIO * d + compare.BF16_SLACK[n] for n, d in own.items()}
    deviations = compare.bf16_deviations(ours, plain, start)
    for name in ("gradients", "weights"):
        ratio = f"bf16/reference {name}"
        largest[ratio] = max(largest.get(ratio, 0.0), deviations[name] / own[name])
    check(largest, "bf16", limits, deviations)
