"""Masters, moments and gradients of single parameters: read, replaced, and trained on."""

import sys

import pytest
from record import run

_CASES = [
    f"{where}-{dtype}"
    for where in ("stage0", "stage1", "stage2", "stage3", "host", "disk")
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def found():
    return run(sys.executable, "fragments.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"})


@pytest.mark.parametrize("case", _CASES)
def test_as_a_torch_optimizer_with_the_same_edits(case, found):
    ours = found[case]
    assert "error" not in ours, ours
    assert max(ours["gaps"]) < 1e-6 and len(ours["gaps"]) == 5
    assert ours["pieces"] < 1e-6
