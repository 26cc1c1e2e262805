"""Scripts for DeepSpeed train on a machine's devices, without a change, as DeepSpeed on a CPU."""

from __future__ import annotations

import json
import pathlib
import sys

import drop_in_ranks
import on_device
import pytest

DROP_IN = pathlib.Path(__file__).parents[1] / "drop_in"
sys.path.append(str(DROP_IN))

import model_ranks  # noqa: E402 - of that folder
import offloaded_inputs  # noqa: E402 - of that folder
import record  # noqa: E402 - of that folder

pytestmark = pytest.mark.skipif(on_device.NAME != "sim", reason="it lends the device a name")

_OURS = {"PENSTOCK_AS_DEEPSPEED": "1"}
_OWN_NAME = {"PENSTOCK_SIM_NAME": "sim"}
# Script of tests/drop_in -> cases. DeepSpeed's losses on a CPU are recorded.
LOOPS = (
    *(f"zero{stage}-fp32" for stage in range(4)),
    *("offload-zero2", "offload-zero3", "zero1-accumulate", "zero3-clip", "adam-l2"),
    *("plain-backward-zero2", "schedule-WarmupLR"),
)
SCRIPTS = {
    "accelerated": ("stage0", "stage1", "stage2-accumulate", "stage3-saves", "offload3"),
    "trainers": ("zero2-llama", "zero3_offload-gpt2", "zero3-saves", "zero3-resumes"),
    "trl": ("zero3-sft", "zero2-offload-dpo", "zero3-dpo"),
}
FILES = {"trl": "trl_trainers.py"}
LIGHTNING = ("stage2-accumulate", "stage3", "offload", "as-it-is")


def _run(script, cases, folder, env=_OURS):
    """What the cases find on two simulated devices."""
    given = [] if folder is None else [str(folder)]
    return record.run(
        sys.executable, "../device/lent_cuda.py", 2, env, [str(DROP_IN / script), *given, *cases]
    )


def _compare(ours, theirs, case):
    assert "error" not in ours, (case, ours)
    assert ours["device"] == "sim:0", case
    for key in ("losses", "rates", "eval", "rewards/margins"):
        if key in theirs:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-5), (case, key)
    for key in ("counts", "again"):
        assert ours.get(key) == theirs.get(key), (case, key)


@pytest.fixture(scope="module")
def recorded():
    return json.loads(record.RECORDED.read_text())


def test_loops_on_a_device_with_its_own_name(recorded):
    found = _run("loops.py", LOOPS, None, _OURS | _OWN_NAME)
    for case in LOOPS:
        _compare(found[case], recorded["loops"][case], case)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_frameworks(script, recorded, tmp_path, request):
    if script != "trainers" and not request.config.getoption("full"):
        pytest.skip("a script of a framework takes its time on simulated devices: with --full")
    found = _run(FILES.get(script, f"{script}.py"), SCRIPTS[script], tmp_path)
    for case in SCRIPTS[script]:
        _compare(found[case], recorded[script][case], case)


LIMITS = {"gradients": 1e-6, "losses": 1e-5, "norms": 1e-5, "weights": 1e-5, "evaluated": 1e-5}


@pytest.mark.parametrize("kind", ("tensor", "sequence", "pipe"))
def test_ranks_of_one_model(kind):
    names = [name for name in model_ranks.CASES if name.startswith(kind)]
    found = _run("model_ranks.py", names, None, _OURS | _OWN_NAME)
    for name in names:
        told = found[name]
        assert "error" not in told, (name, told)
        assert told["device"] == "sim:0", name
        assert "weights" in told and all(told.get(one, 0) < LIMITS[one] for one in LIMITS), told


def test_lightning_modules(tmp_path, request):
    if not request.config.getoption("full"):
        pytest.skip("a script of a framework takes its time on simulated devices: with --full")
    plain = ["plain", "plain-accumulate"]
    expected = record.run(sys.executable, "lightnings.py", 2, {}, [str(tmp_path), *plain])
    found = _run("lightnings.py", LIGHTNING, tmp_path)
    for case in LIGHTNING:
        like = "plain-accumulate" if "accumulate" in case else "plain"
        _compare(found[case], {"losses": expected[like]["losses"]}, case)


def test_accelerator(drop_in_pools):
    assert drop_in_pools(2).run(drop_in_ranks.accelerator) == [[], []]


CALLS = ("chosen", "refused", "collectives", "loader")


@pytest.mark.parametrize("call", CALLS)
def test_calls(call, drop_in_pools):
    drop_in_pools(2).run(getattr(drop_in_ranks, call))


@pytest.mark.parametrize(("stage", "built"), ((1, True), (3, False), (3, True)))
def test_parameters(stage, built, drop_in_pools):
    drop_in_pools(2).run(drop_in_ranks.parameters, stage, built)


@pytest.mark.parametrize("pins", (True, False))
@pytest.mark.parametrize("keep", (0, 1, 9))
def test_inputs_of_recomputed_layers_wait_on_the_host(keep, pins, drop_in_pools):
    (found,) = drop_in_pools(1).run(offloaded_inputs.counts, "device", keep, pins)
    moved = max(0, offloaded_inputs.LAYERS - keep)
    assert found["offloaded_tensors"] == found["restored_tensors"] == moved
    assert found["kept_last_tensors"] == offloaded_inputs.LAYERS - moved
    assert found["offloaded_bytes"] == moved * 8 * offloaded_inputs.WIDTH * 4
    assert found["skipped_marked_tensors"] == 0


def test_which_marked_inputs_move(drop_in_pools):
    assert drop_in_pools(1).run(offloaded_inputs.marked_by_hand) == [[1, 0, 0]]
