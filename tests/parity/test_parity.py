"""Layout does not change the answer: every strategy against plain torch in one process.

`pytest tests/parity` runs a sample, `pytest tests/parity --full` the whole matrix (cases.py).
"""

from __future__ import annotations

import cases
import compare


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = cases.matrix() if metafunc.config.getoption("full") else cases.sample()
        metafunc.parametrize("case", chosen, ids=str)


def test_parity(case, pools, largest):
    compare.assert_parity(case, pools, largest)
