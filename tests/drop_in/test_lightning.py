"""A Lightning module under PenstockStrategy: as under Lightning's DDP."""

import sys

import pytest
from lightning_cases import CASES
from record import run


@pytest.fixture(scope="module")
def found(tmp_path_factory, names_of):
    names = names_of("found", CASES, "plain", "stage1", "stage2", "stage3")
    folder = str(tmp_path_factory.mktemp("saved"))
    return run(sys.executable, "lightnings.py", 2, {}, [folder, *names])


@pytest.mark.parametrize("case", CASES)
def test_module(case, found):
    ours = found[case]
    assert "error" not in ours, ours
    like = found[CASES[case].get("as", "plain" if "bf16" in case else case)]["losses"]
    tolerance = 3e-2 if "bf16" in case else 2e-6
    seen = len(ours["losses"])
    assert seen == (4 if "resume" in case else 8)
    assert ours["losses"] == pytest.approx(like[-seen:], abs=tolerance)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_checkpoint(stage, found):
    ours = found[f"stage{stage}"]
    model = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    for name in (f"checkpoint/{model}_model_states.pt", "latest", "zero_to_fp32.py"):
        assert name in ours["files"]
    assert len(ours["names"]) == 8
    assert ours["sum"] == pytest.approx(found["stage1"]["sum"], abs=1e-5)
