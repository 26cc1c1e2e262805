"""A plain loop of Accelerate with its DeepSpeed plugin: as without, and as with DeepSpeed."""

import json
import sys

import pytest
from accelerated_cases import CASES
from record import RECORDED, run

_OURS = {"PENSTOCK_AS_DEEPSPEED": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory, names_of):
    names = names_of("found", CASES, "stage2-saves", "stage3-saves")
    folder = str(tmp_path_factory.mktemp("saved"))
    return run(sys.executable, "accelerated.py", 2, _OURS, [folder, *names])


@pytest.mark.parametrize("case", CASES)
def test_loop(case, found):
    ours = found[case]
    assert "error" not in ours and ours["ranks"] == 2
    theirs = json.loads(RECORDED.read_text())["accelerated"][case]
    for other in (theirs, found[CASES[case].get("as", case)]):
        steps = len(ours["losses"])
        assert ours["losses"] == pytest.approx(other["losses"][:steps], abs=2e-6)
        assert ours["rates"] == pytest.approx(other["rates"][:steps], abs=1e-12)
    for key in ("again", "names", "files"):
        assert ours.get(key) == theirs.get(key)


def test_what_was_saved_goes_on(found):
    assert found["stage2-saves"]["again"] and found["stage3-saves"]["again"]
