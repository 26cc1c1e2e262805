"""penstock convert: checkpoints of others in and out, and files that would run code.

tests/foreign/deepspeed was written by DeepSpeed itself (tests/foreign/write_deepspeed.py).
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil

import pytest
import torch
import torch.distributed as dist
import trained
from converted import engine_of, losses_of
from test_api import initialize

import penstock
from penstock.cli import main
from penstock.conversion import Options, convert, pickles

DEEPSPEED = pathlib.Path(trained.__file__).parent / "deepspeed"
CASES = sorted(path.name for path in DEEPSPEED.iterdir())


def foreign(case, folder):
    """A copy of DeepSpeed's checkpoint, to be changed."""
    return pathlib.Path(shutil.copytree(DEEPSPEED / case, folder / case))


# ---- DeepSpeed


def resumed(case, strategy, folder):
    engine = engine_of({"strategy": strategy, "precision": case.split("-")[1]})
    state = engine.load(folder)
    start = engine.steps
    losses = losses_of(engine, dist.get_rank())
    engine.close()
    return state, start, losses


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_next_losses(case, strategy, pools, tmp_path):
    assert main(["convert", str(DEEPSPEED / case), str(tmp_path)]) == 0
    found = pools(2).run(resumed, case, strategy, str(tmp_path))
    for state, start, _ in found:
        assert state == {"epoch": 1, "best": 0.5}
        assert start == trained.BEFORE
    losses = torch.tensor([losses for *_, losses in found]).mean(0)
    wanted = torch.tensor(json.loads((DEEPSPEED / case / "next.json").read_text())["losses"])
    near = 1e-6 if "fp32" in case else 1e-3
    assert torch.allclose(losses, wanted, rtol=near), (losses, wanted)
    assert torch.allclose(losses[:1], wanted[:1], rtol=1e-6 if "fp32" in case else 2e-4)


def test_the_loss_scale_and_counts_come_over(tmp_path):
    made = pathlib.Path(convert(DEEPSPEED / "zero1-fp16", tmp_path))
    state = json.loads((made / "checkpoint.json").read_text())["state"]
    assert state["loss_scale"] == {"active": True, "value": 256.0, "good_steps": 3}
    assert set(state["updates"].values()) == {3}


def test_a_scheduler_of_another_kind_is_refused(tmp_path):
    convert(DEEPSPEED / "zero2-fp32", tmp_path)
    engine = initialize(trained.Model(), {}, optimizer={"type": "AdamW"})
    with pytest.raises(penstock.ConfigError, match="groups"):
        engine.load(tmp_path)
    engine.close()
    engine = engine_of(scheduler=False)
    assert engine.load(tmp_path)["epoch"] == 1
    assert engine.optimizer.param_groups[0]["lr"] == 0.005
    engine.close()
    model = trained.Model()
    optimizer = torch.optim.AdamW(trained.groups(model), **trained.GROUPS)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    engine = initialize(model, {}, optimizer=optimizer, lr_scheduler=cosine)
    with pytest.raises(penstock.ConfigError, match="a scheduler with the keys step_size"):
        engine.load(tmp_path)
    engine.close()


def remove(pattern):
    def change(folder):
        for path in folder.rglob(pattern):
            path.unlink()

    return change


def cut(pattern):
    def change(folder):
        for path in folder.rglob(pattern):
            os.truncate(path, path.stat().st_size // 2)

    return change


def of_tensor_parallel(folder):
    path = next(folder.rglob("*_mp_rank_00_optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def changed(pattern, change):
    """A change of what is in the files."""

    def change_all(folder):
        for path in folder.rglob(pattern):
            held = pickles.load(path)
            change(held)
            torch.save(plain_values(held), path)

    return change_all


def plain_values(held):
    """Without objects of classes, of which a conversion needs none but the loss scaler."""
    if isinstance(held, dict):
        return {key: plain_values(value) for key, value in held.items()}
    if isinstance(held, list):
        return [plain_values(value) for value in held]
    if isinstance(held, torch.Tensor):
        return held.clone()  # not of the file, which is about to be written
    return None if isinstance(held, pickles.Inert) else held


def cut_flat(held):
    flat = held["optimizer_state_dict"]["fp32_flat_groups"]
    held["optimizer_state_dict"]["fp32_flat_groups"] = [one[:3].clone() for one in flat]


def no_counts(held):
    for state in held["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del state["step"]


def more_parts(held):
    held["optimizer_state_dict"]["partition_count"] = 4


def no_shape(held):
    del held["param_shapes"][0]["hidden.weight"]


with_fewer_elements = changed("*optim_states.pt", cut_flat)
without_counts = changed("*optim_states.pt", no_counts)
cut_in_more_parts = changed("*optim_states.pt", more_parts)
without_a_shape = changed("*model_states.pt", no_shape)


def of_two_runs(folder):
    for path in list(folder.rglob("bf16_zero*")):
        shutil.copy(path, path.with_name(path.name.removeprefix("bf16_")))


class Planted:
    """What a pickle would call when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


class Settings:
    """An object of a user's class among what is saved."""

    def __setstate__(self, state):
        raise AssertionError("code of a checkpoint was run")

    def __getstate__(self):
        return {"lr": 0.1}


def with_code(folder):
    path = next(folder.rglob("*model_states.pt"))
    held = torch.load(path, weights_only=True) | {"args": Planted(folder / "ran")}
    torch.save(held, path)


DAMAGES = [
    (
        "zero2-bf16",
        remove("*rank_0_*optim*"),
        "the files of .0. are missing|has files of the data ranks",
    ),
    ("zero2-bf16", remove("*rank_1_*optim*"), "of 1 rank.s., but the run had 2"),
    ("zero3-bf16", cut("*rank_1_*optim*"), "cannot read"),
    ("zero3-bf16", cut("*rank_1_*model*"), "cannot read"),
    ("zero2-bf16", of_tensor_parallel, "mp_rank_00 records a run with 1"),
    ("zero3-bf16", with_fewer_elements, "elements"),
    ("zero3-bf16", remove("*optim*"), "no optimizer states"),
    ("zero2-bf16", of_two_runs, "two checkpoints"),
    ("zero2-bf16", without_counts, "no step count"),
    ("zero3-bf16", cut_in_more_parts, "4 parts, but there are 2 ranks"),
    ("zero3-bf16", without_a_shape, "elements"),
    ("zero2-bf16", with_code, "mkdir"),
    ("zero3-bf16-universal", cut("exp_avg.pt"), "cannot read"),
    ("zero3-bf16-universal", remove("optimizer_state.pt"), "optimizer_state"),
    ("zero3-bf16-universal", remove("hidden.weight/*"), "hidden.weight"),
    ("zero3-bf16-universal", remove("hidden.weight/exp_avg.pt"), "hidden.weight"),
]


@pytest.mark.parametrize(("case", "change", "says"), DAMAGES)
def test_what_is_damaged_is_said(case, change, says, tmp_path, capsys):
    folder = foreign(case, tmp_path)
    change(folder)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert not (folder / "ran").exists()


def test_a_count_of_the_group_is_each_parameters(tmp_path):
    def move(held):
        inner = held["optimizer_state_dict"]["base_optimizer_state"]
        for group in inner["param_groups"]:
            group["step"] = int(inner["state"][group["params"][0]].pop("step"))

    folder = foreign("zero2-fp32", tmp_path)
    changed("*optim_states.pt", move)(folder)
    made = pathlib.Path(convert(folder, tmp_path / "out"))
    state = json.loads((made / "checkpoint.json").read_text())["state"]
    assert set(state["updates"].values()) == {3}
    assert len(state["updates"]) == 6


def test_without_optimizer_states_the_weights_are_the_models(tmp_path):
    folder = foreign("zero2-bf16", tmp_path)
    remove("*optim*")(folder)
    said = []
    made = convert(folder, tmp_path / "w.bin", Options(to="torch", say=said.append))
    found = torch.load(made, weights_only=True)
    trained.Model().load_state_dict(found)
    assert found["hidden.weight"].dtype == torch.bfloat16
    assert any("no optimizer states" in line for line in said)


def test_state_of_one_group_alone_comes_over(tmp_path):
    def add(held):
        state = held["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[1]["max_exp_avg_sq"] = state[1]["exp_avg_sq"] * 2

    folder = foreign("zero2-fp32", tmp_path)
    changed("*optim_states.pt", add)(folder)
    made = pathlib.Path(convert(folder, tmp_path / "out"))
    tensors = json.loads((made / "checkpoint.json").read_text())["tensors"]
    found = {one["name"] for one in tensors if one["role"] == "optim.max_exp_avg_sq"}
    assert found == {"norm.weight", "norm.bias", "hidden.bias"}


def test_skipped_steps_are_no_steps(tmp_path):
    folder = foreign("zero1-fp16", tmp_path)
    changed("*model_states.pt", lambda held: held.update(global_steps=9, skipped_steps=4))(folder)
    made = pathlib.Path(convert(folder, tmp_path / "out"))
    state = json.loads((made / "checkpoint.json").read_text())["state"]
    assert (state["steps"], state["skipped"]) == (5, 4)


def test_what_is_there_is_not_replaced(tmp_path):
    convert(DEEPSPEED / "zero2-fp32", tmp_path)
    with pytest.raises(penstock.ConfigError, match="already"):
        convert(DEEPSPEED / "zero2-bf16", tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "dcp", "dtype": torch.bfloat16}, "dtype has no effect"),
        ({"key": "model"}, "key has no effect"),
        ({"to": "onnx"}, "to is"),
    ],
)
def test_settings_without_effect_are_refused(options, says, tmp_path):
    with pytest.raises(penstock.ConfigError, match=says):
        convert(DEEPSPEED / "zero2-fp32", tmp_path / "out", Options(**options))


def test_a_named_class_is_passed_over(tmp_path):
    folder = foreign("zero2-bf16", tmp_path)
    path = next(folder.rglob("*model_states.pt"))
    held = torch.load(path, weights_only=True) | {"settings": Settings()}
    torch.save(held, path)
    name, said = f"{__name__}.Settings", []
    with pytest.raises(penstock.ConfigError, match=f"--inert {name}"):
        convert(folder, tmp_path / "out")
    convert(folder, tmp_path / "out", Options(inert=[name], say=said.append))
    assert any("settings" in line for line in said)
