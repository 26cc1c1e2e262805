"""A window's weight is applied once, whatever the graph is and whoever calls backward."""

import sys

import pytest
from plain_backwards import NAMES
from record import run


@pytest.fixture(scope="module")
def found():
    return run(sys.executable, "plain_backwards.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"})


@pytest.mark.parametrize("case", NAMES)
def test_as_one_process(case, found):
    """`off`: the largest difference of a weight, relative to the largest change by training."""
    assert "error" not in found[case], found[case]
    assert found[case]["off"] < {"bf16": 3e-2, "fp16": 3e-3}.get(case[:4], 1e-5)
