"""No hang: a rank that dies, stops, raises or diverges ends all ranks in time, naming it."""

from __future__ import annotations

import faults
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
