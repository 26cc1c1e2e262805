"""No hang: a rank that dies, stops, raises or diverges ends all ranks in time, naming it."""

from __future__ import annotations

import faults
import pytest
from faults import EVERY, FAULTS


def pytest_generate_tests(metafunc):
    """Waiting is slow: the daily run has all faults under zero3, and some under others."""
    if "name" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("full"):
        chosen = [(n, s, seed) for n in FAULTS for s in sorted(EVERY) for seed in (1, 2, 3)]
        chosen = [one for one in chosen if FAULTS[one[0]].signum or one[2] == 1]
    else:
        chosen = [(name, "zero3", 1) for name in FAULTS]
        chosen += [(name, "ddp", 1) for name in FAULTS if "raises" in name or "leaves" in name]
        chosen += [("killed", "ddp", 1), ("killed", "zero2", 1)]
    metafunc.parametrize(("name", "strategy", "seed"), chosen)


def test_fault(name, strategy, seed, pools):
    faults.check(name, strategy, seed, pools)


# What layers of ranks that compute one model together wait for one another in.
TOGETHER = [
    ("raises in forward", "zero3", 2),
    ("raises in backward", "zero2", 4),
    ("killed", "zero3", 2),
    ("killed", "zero2", 4),
    ("stopped", "zero2", 2),
    ("skips a unit", "zero2", 4),
    ("reverses its units", "ddp", 2),
    ("full_grads on one rank", "zero3", 2),
    ("leaves its loop and closes", "ddp", 4),
    ("leaves its process", "zero3", 2),
]


@pytest.mark.parametrize(("fault", "sharding", "tensor"), TOGETHER)
def test_fault_of_a_tensor_rank(fault, sharding, tensor, pools):
    faults.check(fault, sharding, 1, pools, tensor=tensor)
