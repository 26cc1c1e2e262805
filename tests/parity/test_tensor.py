"""Tensor ranks: what a mesh with `tensor` > 1 trains is what plain torch trains in one process.

`pytest tests/parity/test_tensor.py` runs a sample, with `--full` every case.
"""

from __future__ import annotations

import cases
import compare
import pytest
import training
from training import Case

pytestmark = pytest.mark.timeout(480)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        chosen = cases.tensor_matrix() if full else cases.tensor_sample()
        metafunc.parametrize("case", chosen, ids=str)


def test_mesh(case, pools, largest):
    compare.assert_parity(case, pools, largest)


HOST, DISK = "host", "disk"
TIERS = [
    ("zero2", "fp32", 3, {"optimizer": HOST, "gradients": DISK}),
    ("zero3", "fp32", 1, {"optimizer": HOST, "params": HOST}),
    ("zero3", "bf16", 3, {"optimizer": DISK, "params": DISK, "window_bytes": 1}),
    ("zero3", "fp32", 3, {"optimizer": DISK, "params": DISK, "gradients": DISK}),
    ("zero3", "fp32", 1, {"optimizer": HOST, "late_update": True}),
    ("ddp", "fp32", 1, {"optimizer": DISK}),
]


@pytest.mark.parametrize("tiers", TIERS, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_tiers(world, tiers, pools, largest, tmp_path):
    strategy, precision, accumulate, offload = tiers
    case = Case(strategy, precision, accumulate, world, model="parts", tensor=2)
    path = {"path": str(tmp_path)} if DISK in offload.values() else {}
    settings = {"offload": offload | path}
    outcomes = pools(world).run(training.train_with, case, settings)
    compare.assert_equal(case, outcomes, largest, lambda asked: training.reference(*asked))
