"""Checkpoints of deepspeed.initialize()'s engine: arguments, settings, files, DeepSpeed's own."""

import json
import os
import pathlib
import sys

import pytest
import torch
from record import run

from penstock.conversion import universal

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {"PENSTOCK_AS_DEEPSPEED": "1", "TMPDIR": str(tmp_path_factory.mktemp("saved"))}
    return run(sys.executable, "checkpoint_calls.py", 2, env)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_training_resumes_with_equal_losses(stage, found):
    expected = {"same": True, "lr": True, "client": {"n": 3}, "steps": 2, "place": "global_step2"}
    assert found[f"resume-stage{stage}"] == expected


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_save_in_a_window_keeps_the_window(stage, found):
    expected = {"weights": True, "losses": True, "end": True, "steps": [2, 2]}
    assert found[f"in_window-stage{stage}"] == expected


@pytest.mark.parametrize("stage", (0, 3))
def test_parts_that_are_not_loaded(stage, found):
    ours = found[f"only-stage{stage}"]
    kept = {"weights": True, "finite": True}
    assert ours == {
        "module": {**kept, "steps": 0, "scheduler": False},
        "no_optimizer": {**kept, "steps": 3, "scheduler": True},
        "no_scheduler": {**kept, "steps": 3, "scheduler": False},
    }


@pytest.mark.parametrize("stage", (0, 3))
def test_frozen_parameters_can_be_left_out(stage, found):
    ours = found[f"frozen-stage{stage}"]
    assert ours["smaller"] and ours["kept"] and ours["same"], ours
    assert "missing in the checkpoint: param/first" in ours["strict"].replace("\n  ", " ")
    assert ours["module"] == (None if stage == 3 else ["last.bias", "last.weight"])


@pytest.mark.parametrize("stage", (1, 3))
def test_weights_that_only_one_side_has(stage, found):
    ours = found[f"strict-stage{stage}"]
    assert "belongs to another model" in ours["said"] and "third" in ours["said"]
    assert ours["taken"] and ours["client"] == {"n": 1}
    assert "differs from the checkpoint in these parameters: third" in ours["states"]


def test_tags_that_differ(found):
    ours = found["tags-stage2"]
    assert "AssertionError" in ours["Fail"] and "Fail0, Fail1" in ours["Fail"]
    assert ours["Warn"] == ours["Ignore"] == ""
    assert ours["folders"] == ["Ignore0", "Warn0"]
    assert "tag_validation" in ours["foo"] and "ConfigError" in ours["foo"]


def test_folders(found):
    ours = found["folders-stage2"]
    for name in ("none", "empty"):
        assert "ValueError" in ours[name] and "save_dir is" in ours[name]
    assert "called save() with different arguments" in ours["differs"]
    assert ours["missing"] is True
    assert "there is no" in ours["no_tag"]


@pytest.mark.parametrize("stage", (0, 3))
def test_a_function_loads_the_weights(stage, found):
    ours = found[f"custom-stage{stage}"]
    assert ours["whole"] and ours["module"] == [True, 0, True] and ours["all"] == [True, 2, True]
    assert "parameter group 0" in ours["strict"] and ours["other"]


def test_a_conversion_is_made_again_when_its_source_is_newer(tmp_path):
    made, source = tmp_path / "made", tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    made.mkdir()
    assert not universal.is_newer(made, source)  # it is no checkpoint
    for name, at in (("a", 5), ("inner/b", 7)):
        (source / name).write_text("")
        os.utime(source / name, (at, at))
    (made / "checkpoint.json").write_text("{}")
    for at, newer in ((6, False), (7, False), (8, True)):
        os.utime(made / "checkpoint.json", (at, at))
        assert universal.is_newer(made, source) is newer, at


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_files_for_other_programs(stage, found):
    expected = {"latest": "a", "script": True, **({"module": True} if stage < 3 else {})}
    assert found[f"files-stage{stage}"] == expected


@pytest.mark.parametrize("stage", (1, 3))
def test_universal_checkpoints(stage, found):
    ours = found[f"universal-stage{stage}"]
    assert "make the checkpoint with ds_to_universal" in ours["missing"]
    assert ours["same"] and ours["place"] == "a_u" and ours["client"]["n"] == 3


@pytest.mark.parametrize(
    ("case", "near"),
    [("zero1-fp16", 1e-3), ("zero2-fp32", 1e-6), ("zero3-fp32", 1e-6),
     ("zero3-bf16-universal", 1e-3)],
)  # fmt: skip
def test_runs_of_deepspeed_continue(case, near, found):
    ours = found[f"theirs-{case}"]
    assert "error" not in ours, ours
    wanted = json.loads((ROOT / f"tests/foreign/deepspeed/{case}/next.json").read_text())["losses"]
    assert torch.allclose(torch.tensor(ours["losses"]), torch.tensor(wanted), rtol=near), ours
    assert ours["place"] == "global_step3.penstock" and ours["again"]
    assert ours["client"] == {"epoch": 1, "best": 0.5} and ours["start"] == [3, 0]
