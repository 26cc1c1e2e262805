"""The same loops on DeepSpeed (recorded) and on the package that runs on Penstock."""

import json
import sys

import pytest
from loop_cases import CASES, STEPS, expressions
from record import RECORDED, run

_OURS = {"PENSTOCK_AS_DEEPSPEED": "1"}
# Where DeepSpeed itself could not: fp16 on a CPU, SGD without being told that it is untested.
_ALONE = {"fixed-scale", "dynamic-scale", "sgd"}
# DeepSpeed's calls that differ, and why.
_OTHER = {
    "e.get_batch_info()": "DeepSpeed returns its bound methods",
    "e.amp_enabled()": "is gone in 0.19.8",
    "e.sparse_gradients_enabled()": "is gone in 0.19.8",
    "e.eval().training": "DeepSpeed's eval() returns None",
    "e.train().training": "DeepSpeed's train() returns None",
    "round(e.get_global_grad_norm(), 4)": "DeepSpeed returns a tensor, which has no round()",
}


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def loops(names_of):
    names = names_of("loops", CASES, "dynamic-scale")
    return run(sys.executable, "loops.py", 2, _OURS, names)


@pytest.fixture(scope="module")
def calls():
    return run(sys.executable, "calls.py", 2, _OURS)


def _tolerance(case):
    """Of a loss. DeepSpeed's stage 0 in bf16 keeps no fp32 weights."""
    return 2e-2 if case == "zero0-bf16" else 5e-3 if "bf16" in case else 2e-6


@pytest.mark.parametrize("case", sorted(set(CASES) - _ALONE))
def test_as_deepspeed(case, recorded, loops):
    theirs, ours = recorded["loops"][case], loops[case]
    assert "error" not in ours and len(ours["losses"]) == STEPS
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=_tolerance(case))
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12, abs=1e-15)
    assert ours["counts"] == theirs["counts"]
    steps = [one for one in theirs["lines"] if "SamplesPerSec" not in one]
    assert ours["lines"] == steps
    for norm, other in zip(ours["norms"], theirs["norms"], strict=True):
        if norm is not None and other is not None:  # stage 0 in fp32: DeepSpeed tells none
            assert norm == pytest.approx(other, abs=2 * _tolerance(case))
    assert set(theirs["files"]) <= set(ours["files"])


@pytest.mark.parametrize("case", sorted(_ALONE))
def test_beyond_deepspeed(case, recorded, loops):
    assert "error" in recorded["loops"][case]
    assert loops[case]["losses"][-1] < loops[case]["losses"][0]


@pytest.mark.parametrize("call", expressions())
def test_returns_what_deepspeed_does(call, recorded, calls):
    theirs, ours = recorded["calls"][call], calls[call]
    if call in _OTHER:
        assert ours != theirs
        assert not str(ours).startswith("raises")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-3)
    else:
        assert ours == theirs


def test_overflows_are_skipped_and_counted(loops):
    steps, _, _, skipped = loops["dynamic-scale"]["counts"]
    assert steps == STEPS and skipped > 0
