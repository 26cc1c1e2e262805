"""A schedule-free optimizer shows its average at once through every way to the drop-in."""

import sys

import pytest
from own_optimizer_cases import NAMES
from record import run


@pytest.fixture(scope="module")
def found():
    return run(sys.executable, "own_optimizers.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"})


@pytest.mark.parametrize("case", NAMES)
def test_average_is_shown(case, found):
    """`off`: the largest difference from plain torch in any look, by rank."""
    assert "error" not in found[case], found[case]
    assert max(found[case]["off"]) < 1e-5 < 5e-3 < found[case]["swapped"]
