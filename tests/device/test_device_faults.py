"""No hang where ranks wait for one another on a device, which the host does not see."""

from __future__ import annotations

import faults
from faults import EVERY, FAULTS

OFFLOAD = {"": {}, "optimizer": {"optimizer": "host"}, "all": {"optimizer": "host", "params": "host"}}
DAILY = [
    ("raises in forward", "zero3", ""),
    ("raises in forward", "ddp", ""),
    ("raises in backward", "zero3", "all"),
    ("raises in step", "zero2", "optimizer"),
    ("killed", "zero3", ""),
    ("killed", "zero2", "optimizer"),
    ("stopped", "zero3", ""),
    ("reverses its units", "zero3", ""),
    ("leaves its loop and closes", "zero3", ""),
    ("leaves its process", "zero3", "all"),
]


def pytest_generate_tests(metafunc):
    chosen = DAILY
    if metafunc.config.getoption("full"):
        chosen = [(n, s, o) for n in FAULTS for s in sorted(EVERY) for o in OFFLOAD]
        chosen = [(n, s, o) for n, s, o in chosen if s in faults.FREES_PARAMS or o != "all"]
    metafunc.parametrize(("name", "strategy", "offload"), chosen)


def test_fault(name, strategy, offload, device_pools):
    faults.check(name, strategy, 1, device_pools, accelerated=True, offload=OFFLOAD[offload])
