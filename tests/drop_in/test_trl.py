"""TRL's trainers under DeepSpeed's configs: as without DeepSpeed, and as with DeepSpeed itself."""

import json
import sys

import pytest
from record import RECORDED, run_trl
from trl_cases import CASES, chosen


def pytest_generate_tests(metafunc):
    metafunc.parametrize("case", chosen(metafunc.config.getoption("full")))


@pytest.fixture(scope="module")
def found(names_of, tmp_path_factory):
    """What each case gives on two ranks."""
    folder = str(tmp_path_factory.mktemp("trl"))
    return run_trl(sys.executable, {"PENSTOCK_AS_DEEPSPEED": "1"}, names_of("found", CASES), folder)


def _same(mine, other):
    assert "error" not in mine, mine
    assert mine["losses"] == pytest.approx(other["losses"], abs=1e-5)
    for norm, their in zip(mine["norms"], other["norms"], strict=True):
        assert their is None or norm == pytest.approx(their, abs=1e-4)  # DeepSpeed's stage 0: None
    for key in ("rewards/margins", "kl", "reward", "mean_token_accuracy"):
        assert mine.get(key) == pytest.approx(other.get(key), abs=1e-5), key


def test_as_without_deepspeed(case, found):
    assert len(found[case]["losses"]) == 3
    _same(found[case], found[CASES[case].get("as", case)])


def test_as_deepspeed(case, found):
    # DeepSpeed has no section "penstock": there, this is the same case without it.
    theirs = json.loads(RECORDED.read_text())["trl"][case.removesuffix("-section")]
    _same(found[case], theirs)
    assert found[case].get("files") == theirs.get("files")
    assert found[case].get("saved") == pytest.approx(theirs.get("saved"), abs=1e-4)
