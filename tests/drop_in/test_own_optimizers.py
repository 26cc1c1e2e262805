"""User-defined optimizers show their average at once, however the drop-in is called, and SAM's
first step is refused at the call."""

import sys

import pytest
from own_optimizer_cases import NAMES, REFUSED
from record import run


@pytest.fixture(scope="module")
def found(names_of):
    names = names_of("found", dict.fromkeys([*NAMES, *REFUSED], {}))
    return run(sys.executable, "own_optimizers.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"}, names)


@pytest.mark.parametrize("case", NAMES)
def test_average_is_shown(case, found):
    """`off`: the largest difference from plain torch in any look, by rank."""
    assert "error" not in found[case], found[case]
    assert max(found[case]["off"]) < 1e-5 < 5e-3 < found[case]["swapped"]


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_nothing_changed(case, found):
    assert "error" not in found[case], found[case]
    assert max(found[case]["off"]) < 1e-5
    for told in found[case]["errors"]:
        assert "Sam.first_step()" in told and "gradients" in told, told
    assert found[case]["errors"]
