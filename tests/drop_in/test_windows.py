"""Windows that the script decides: managed_gradient_accumulation, boundaries, no_sync()."""

import sys

import pytest
from record import run
from windows import NAMES, SIZES


@pytest.fixture(scope="module")
def found():
    return run(sys.executable, "windows.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"})


def is_refused(name):
    return name.startswith("no_sync") and name[-1] in "23" or name == "coalesce-stage0"


@pytest.mark.parametrize("name", NAMES)
def test_as_one_process(name, found):
    ours = found[name]
    assert "error" not in ours, ours
    if is_refused(name):
        assert "as in DeepSpeed" in ours["said"]["enter"], ours
        return
    assert ours["off"] < 1e-5, ours
    # Each micro-batch has 4 samples on each of two ranks. Without managed accumulation each call of
    # engine.backward() counts, as in DeepSpeed, and otherwise each window of one micro-batch.
    calls = 0 if "plain" in name else sum(SIZES)
    samples = 8 * (calls if name.startswith("unmanaged") else len(SIZES))
    assert ours["counts"] == [len(SIZES), samples, 0]


@pytest.mark.parametrize("stage", range(4))
def test_unmanaged_windows_end_at_step(stage, found):
    ours = found[f"unmanaged-stage{stage}"]
    assert not any(one for window in ours["boundaries"] for one in window)
    assert "each step() then ends a window" in ours["said"]["boundary"]
    assert "each step() then ends a window" in ours["said"]["coalesce"]
    refused = "overlap_comm is supported only with ZeRO stage 2" in ours["said"]["overlap"]
    assert refused if stage < 2 else ours["said"]["overlap"] == ""


@pytest.mark.parametrize("stage", (0, 1))
def test_no_sync_refuses_step_and_itself(stage, found):
    said = found[f"no_sync-stage{stage}"]["said"]
    assert "not allowed inside no_sync()" in said["step"]
    assert "not allowed inside no_sync()" in said["again"]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_coalesce_refuses_step_and_itself(stage, found):
    said = found[f"coalesce-stage{stage}"]["said"]
    assert "no_sync" in said["step"] and "nested" in said["again"]  # as DeepSpeed's texts
    assert "not allowed inside coalesce_grad_reduction()" in said["step"]
    assert "not allowed inside coalesce_grad_reduction()" in said["again"]
