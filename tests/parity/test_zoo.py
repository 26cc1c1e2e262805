"""What real models do to an engine (zoo.py), under every strategy and precision.

`pytest tests/parity` runs a sample, `pytest tests/parity --full` the whole matrix (cases.py).
"""

from __future__ import annotations

import cases
import compare
import pytest
import training
from ranks import Failure
from training import Case


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = cases.zoo_matrix() if metafunc.config.getoption("full") else cases.zoo_sample()
        metafunc.parametrize("case", chosen, ids=str)


def test_zoo(case, pools, largest):
    compare.assert_parity(case, pools, largest)


ORDERS = ["order_by_rank", "order_by_rank_later"]


@pytest.mark.parametrize("model", ORDERS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_ranks_of_different_order_train_where_parameters_stay(strategy, model, pools, largest):
    compare.assert_parity(Case(strategy, model=model), pools, largest)


def train_impatiently(case: Case) -> None:
    training.train(case, comm={"timeout_s": 8})


@pytest.mark.parametrize("model", ORDERS)
@pytest.mark.parametrize("strategy", cases.MOVE_PARAMS)
def test_ranks_of_different_order_end_where_parameters_move(
    strategy, model, pools, record_property
):
    """Ranks may skip units (the zoo has that), but gathers have one order."""
    case = Case(strategy, model=model, world=4 if strategy in cases.NODE_STRATEGIES else 2)
    step = 1 if model == "order_by_rank" else 4
    for outcome in pools(case.world).attempt(train_impatiently, case):
        assert isinstance(outcome, Failure), "it trained"
        assert outcome.is_a("RuntimeFault"), outcome.trace
        assert "rank" in outcome.text and f"step {step}" in outcome.text, outcome.text
    record_property("refused", "RuntimeFault: names rank, step and collective, at the timeout")
