"""Every config of tests/configs, written after DeepSpeed's own examples: explained and run."""

import json
import pathlib
import sys

import pytest
from record import run

from penstock.cli import main

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.json"))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("nvme"))
    return run(sys.executable, "configured.py", 1, {"PENSTOCK_AS_DEEPSPEED": "1"}, [folder])


def test_there_are_many():
    assert len(CONFIGS) >= 40


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_step(path, found):
    ours = found[path.stem]
    assert "error" not in ours, ours
    assert ours["steps"] == 1 and 2.5 < ours["loss"] < 3.5
    assert len(ours["said"]) <= 1  # one warning that lists them all


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_is_explained(path, capsys):
    assert main(["explain", "--config", str(path), "--world", "2"]) == 0
    said = capsys.readouterr()
    stage = json.loads(said.out)["strategy"]
    assert stage in ("ddp", "zero1", "zero2", "zero3", "hpz", "mics")
    assert said.err.count("\n") >= 1
