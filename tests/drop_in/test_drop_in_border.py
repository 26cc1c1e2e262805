"""What happens at the borders of loops, checkpoints and engines."""

import sys

import pytest
from record import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {"PENSTOCK_AS_DEEPSPEED": "1", "TMPDIR": str(tmp_path_factory.mktemp("border"))}
    return run(sys.executable, "borders.py", 2, env)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_loads(stage, found):
    ours = found[f"stage{stage}"]["loads"]
    assert ours["nothing"] == [None, None]
    assert ours["own"] == 2  # each rank has its own client_state
    assert "typo" in ours["missing"]
    assert ours["counts"] == [3, 4]  # a window begins after the load


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_engines_one_after_the_other(stage, found):
    ours = found[f"stage{stage}"]["engines"]
    assert ours["trains"] and ours["losses"][3] < ours["losses"][0]
    assert ours["losses"] == pytest.approx(found["stage1"]["engines"]["losses"], abs=1e-5)
    assert all("deepspeed.initialize() was called again" in text for text in ours["said"])


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_what_differs_by_rank_is_an_error(stage, found):
    ours = found[f"stage{stage}"]["ranks_differ"]
    assert "differ from those of rank 0" in ours["said"] and ours["same"]
    assert "tiles" in ours["pieces"]
