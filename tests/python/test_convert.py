"""penstock convert: checkpoints of others in and out, and files that would run code.

tests/foreign/deepspeed was written by DeepSpeed itself (tests/foreign/write_deepspeed.py).
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import pickle
import re
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trained
from safetensors.torch import load_file, save_file
from test_api import initialize
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import penstock
from penstock.cli import main
from penstock.conversion import Options, convert, pickles

DEEPSPEED = pathlib.Path(trained.__file__).parent / "deepspeed"
CASES = sorted(path.name for path in DEEPSPEED.iterdir())
STEPS = range(trained.BEFORE, trained.BEFORE + trained.AFTER)


def foreign(case, folder):
    """A copy of DeepSpeed's checkpoint, to be changed."""
    return pathlib.Path(shutil.copytree(DEEPSPEED / case, folder / case))


def engine_of(config=None, named=False, scheduler=True):
    torch.manual_seed(5)  # other weights than the checkpoint's
    model = trained.Model()
    groups = trained.groups(model)
    if named:
        names = {param: name for name, param in model.named_parameters()}
        for group in groups:
            group["params"] = [(names[param], param) for param in group["params"]]
    optimizer = torch.optim.AdamW(groups, **trained.GROUPS)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, **trained.SCHEDULE)
    return initialize(
        model, config or {}, optimizer=optimizer, lr_scheduler=schedule if scheduler else None
    )


def losses_of(engine, rank=0):
    losses = []
    for step in STEPS:
        loss = engine(trained.batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


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
    with pytest.raises(penstock.ConfigError, match="one that keeps step_size"):
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
    ("zero2-bf16", remove("*rank_0_*optim*"), "those of .0. are missing|has files of ranks"),
    ("zero2-bf16", remove("*rank_1_*optim*"), "of 1 rank.s.; the run had 2"),
    ("zero3-bf16", cut("*rank_1_*optim*"), "cannot read"),
    ("zero3-bf16", cut("*rank_1_*model*"), "cannot read"),
    ("zero2-bf16", of_tensor_parallel, "parallel training"),
    ("zero3-bf16", with_fewer_elements, "elements"),
    ("zero3-bf16", remove("*optim*"), "no optimizer states"),
    ("zero2-bf16", of_two_runs, "two checkpoints"),
    ("zero2-bf16", without_counts, "no count of steps"),
    ("zero3-bf16", cut_in_more_parts, "parts on 2 ranks"),
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


# ---- plain torch


def plain_run(steps=trained.BEFORE, named=True):
    torch.manual_seed(0)
    model = trained.Model()
    groups = trained.groups(model)
    if named:
        names = {param: name for name, param in model.named_parameters()}
        groups = [g | {"params": [(names[p], p) for p in g["params"]]} for g in groups]
    optimizer = torch.optim.AdamW(groups, **trained.GROUPS)
    for step in range(steps):
        trained_step(model, optimizer, step)
    return model, optimizer


def trained_step(model, optimizer, step):
    loss = model(trained.batch(step, 0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def wanted_losses():
    model, optimizer = plain_run()
    return [trained_step(model, optimizer, step) for step in STEPS]


def assert_resumes(folder, **options):
    engine = engine_of(scheduler=False)
    engine.load(folder, **options)
    losses = losses_of(engine)
    engine.close()
    assert losses == pytest.approx(wanted_losses(), rel=1e-6)


def write_torch(path, **others):
    model, optimizer = plain_run(**others)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 2}, path)


def write_dcp(path):
    model, optimizer = plain_run(named=False)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "epoch": 2}, checkpoint_id=path, no_dist=True)


def write_flat_dcp(path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # noqa: PLC0415

    model, optimizer = plain_run(named=False)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, no_dist=True)


def write_wrapped(path):
    """As of a run under DistributedDataParallel."""
    torch.manual_seed(0)
    model = trained.Model()
    names = {param: f"module.{name}" for name, param in model.named_parameters()}
    groups = [g | {"params": [(names[p], p) for p in g["params"]]} for g in trained.groups(model)]
    optimizer = torch.optim.AdamW(groups, **trained.GROUPS)
    for step in range(trained.BEFORE):
        trained_step(model, optimizer, step)
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optim": optimizer.state_dict()}, path)


@pytest.mark.parametrize("write", [write_torch, write_wrapped, write_dcp, write_flat_dcp])
def test_a_run_of_torch_goes_on(write, tmp_path):
    write(tmp_path / "theirs")
    made = convert(tmp_path / "theirs", tmp_path / "ours")
    assert made.endswith(f"step-{trained.BEFORE}")
    assert_resumes(tmp_path / "ours")


def test_an_optimizer_by_numbers_is_left_out_and_said(tmp_path, capsys):
    write_torch(tmp_path / "theirs.pt", named=False)
    assert main(["convert", str(tmp_path / "theirs.pt"), str(tmp_path / "ours")]) == 0
    assert "named_parameters" in capsys.readouterr().err
    engine = engine_of(scheduler=False)
    with pytest.raises(penstock.ConfigError, match="weights_only"):
        engine.load(tmp_path / "ours")
    engine.load(tmp_path / "ours", weights_only=True)
    model, _ = plain_run()
    assert engine(trained.batch(7, 0)).item() == pytest.approx(model(trained.batch(7, 0)).item())
    engine.close()


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.module."])
def test_bare_state_dicts(wrapped, tmp_path):
    model, _ = plain_run()
    torch.save({wrapped + k: v for k, v in model.state_dict().items()}, tmp_path / "theirs.bin")
    convert(tmp_path / "theirs.bin", tmp_path / "ours")
    engine = engine_of()
    engine.load(tmp_path / "ours", weights_only=True)
    for name, value in engine.state_dict().items():
        assert value.equal(model.state_dict()[name]), name
    engine.close()


def test_several_state_dicts_ask_which(tmp_path, capsys):
    held = {"actor": trained.Model().state_dict(), "critic": trained.Model().state_dict()}
    torch.save(held, tmp_path / "theirs.pt")
    arguments = ["convert", str(tmp_path / "theirs.pt"), str(tmp_path / "ours")]
    assert main(arguments) == 2
    assert "--key" in capsys.readouterr().err
    assert main([*arguments, "--key", "critic"]) == 0
    assert '"actor" are left out' in capsys.readouterr().err


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_of_hugging_face(sharded, tmp_path):
    engine = engine_of()
    engine.export_hf(tmp_path / "hf", max_shard_bytes=300 if sharded else 10**9)
    wanted = engine.state_dict()
    engine.close()
    convert(tmp_path / "hf", tmp_path / "ours")
    torch.manual_seed(9)
    engine = engine_of()
    engine.load(tmp_path / "ours", weights_only=True)
    for name, value in engine.state_dict().items():
        assert value.equal(wanted[name]), name
    engine.close()


def test_half_precision_and_an_index_that_leads_away(tmp_path):
    model, _ = plain_run()
    held = {k: v.bfloat16() for k, v in model.state_dict().items() if k != "head.weight"}
    save_file(held, tmp_path / "theirs.safetensors")
    with pytest.raises(penstock.ConfigError, match="seen has dtype BF16"):
        convert(tmp_path / "theirs.safetensors", tmp_path / "ours")
        engine = engine_of()
        try:
            engine.load(tmp_path / "ours", weights_only=True)
        finally:
            engine.close()
    held["seen"] = torch.tensor(3)
    save_file(held, tmp_path / "theirs.safetensors")
    convert(tmp_path / "theirs.safetensors", tmp_path / "again")
    engine = engine_of()
    engine.load(tmp_path / "again", weights_only=True)
    loaded = engine.state_dict()
    engine.close()
    assert loaded["hidden.weight"].equal(held["hidden.weight"].float())
    folder = tmp_path / "hf"
    folder.mkdir()
    index = {"weight_map": {"a": "../theirs.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(penstock.RuntimeFault, match="elsewhere"):
        convert(folder, tmp_path / "never")


@pytest.mark.parametrize("kind", ["RAdam", "NAdam", "Adamax", "RMSprop", "SGD", "AdamW"])
def test_other_optimizers_go_on(kind, tmp_path):
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}.get(kind, {})

    def start(named):
        torch.manual_seed(0)
        model = trained.Model()
        params = [(n, p) if named else p for n, p in model.named_parameters() if p.requires_grad]
        return model, getattr(torch.optim, kind)(params, lr=0.01, **options)

    model, optimizer = start(named=True)
    for step in range(trained.BEFORE):
        trained_step(model, optimizer, step)
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "ours")
    wanted = [trained_step(model, optimizer, step) for step in STEPS]
    model, optimizer = start(named=False)
    engine = initialize(model, {"strategy": "zero1"}, optimizer=optimizer)
    engine.load(tmp_path / "ours")
    assert losses_of(engine) == pytest.approx(wanted, rel=1e-6)
    engine.close()


def test_schedulers_come_over_or_stay(tmp_path):
    model, optimizer = plain_run()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, **trained.SCHEDULE)
    schedule.step()
    schedule.step()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "without.pt")
    torch.save(held | {"scheduler": schedule.state_dict()}, tmp_path / "with.pt")
    convert(tmp_path / "with.pt", tmp_path / "with")
    convert(tmp_path / "without.pt", tmp_path / "without")
    engine = engine_of()
    engine.load(tmp_path / "with")
    assert engine.lr_scheduler.last_epoch == 2
    with pytest.warns(RuntimeWarning, match="no scheduler"):
        engine.load(tmp_path / "without")
    engine.close()


def test_weights_that_the_model_ties_are_the_same(tmp_path):
    held = trained.Model().state_dict()
    held["head.weight"] = held["head.weight"] + 1
    torch.save(held, tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "ours")
    engine = engine_of()
    with pytest.raises(penstock.ConfigError, match="head.weight"):
        engine.load(tmp_path / "ours", weights_only=True)
    engine.close()


# ---- out


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A checkpoint of ours, and its weights and next losses."""
    folder = tmp_path_factory.mktemp("ours")
    engine = engine_of(scheduler=False)
    for step in range(trained.BEFORE):
        engine.backward(engine(trained.batch(step, 0)))
        engine.step()
    engine.save(folder)
    weights = copy.deepcopy(engine.state_dict())
    losses = losses_of(engine)
    engine.close()
    return folder, weights, losses


def plain():
    torch.manual_seed(8)
    model = trained.Model()
    return model, torch.optim.AdamW(trained.groups(model), **trained.GROUPS)


def test_to_torch(ours, tmp_path):
    folder, weights, _ = ours
    assert main(["convert", str(folder), str(tmp_path / "w.bin"), "--to", "torch"]) == 0
    model, _ = plain()
    model.load_state_dict(torch.load(tmp_path / "w.bin", weights_only=True))  # strict
    for name, value in model.state_dict().items():
        assert value.equal(weights[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_to_safetensors(dtype, ours, tmp_path):
    folder, weights, _ = ours
    options = ["--to", "safetensors", "--dtype", dtype]
    assert main(["convert", str(folder), str(tmp_path / "out"), *options]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys() - {"head.weight"}
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for name, value in found.items():
        wanted = weights[name]
        assert value.equal(wanted.to(kind) if wanted.is_floating_point() else wanted), name


def test_to_dcp_and_back(ours, tmp_path):
    folder, _, losses = ours
    out = tmp_path / "dcp"
    assert main(["convert", str(folder), str(out), "--to", "dcp"]) == 0
    model, optimizer = plain()
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optim": state}
    dcp.load(held, checkpoint_id=out, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert [trained_step(model, optimizer, step) for step in STEPS] == pytest.approx(losses)
    assert main(["convert", str(folder), str(out), "--to", "dcp"]) == 2  # it is not empty
    convert(out, tmp_path / "back")
    engine = engine_of(scheduler=False)
    engine.load(tmp_path / "back")
    assert losses_of(engine) == losses
    engine.close()


def test_deepspeed_to_fp32(tmp_path):
    made = convert(DEEPSPEED / "zero3-bf16", tmp_path / "w.bin", Options(to="torch"))
    found = torch.load(made, weights_only=True)
    assert found["head.weight"].equal(found["embed.weight"])
    assert found["hidden.weight"].dtype == torch.float32
    trained.Model().load_state_dict(found)


def test_ours_into_ours_is_refused(ours, tmp_path, capsys):
    assert main(["convert", str(ours[0]), str(tmp_path)]) == 2
    assert "load() takes it" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path)]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path)]) == 2
    assert "no checkpoint that is known" in capsys.readouterr().err


# ---- files that would run code


def test_the_metadata_of_dcp_runs_nothing(tmp_path):
    write_dcp(tmp_path / "theirs")
    for planted in (Planted(tmp_path / "ran"), [Planted(tmp_path / "ran")]):
        (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(planted))
        with pytest.raises(penstock.ConfigError, match="mkdir"):
            convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(penstock.RuntimeFault, match="metadata"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ran").exists()


def test_values_of_dcp_run_nothing(tmp_path):
    folder = tmp_path / "theirs"
    dcp.save({"model": {"a": torch.ones(3)}, "x": Planted(tmp_path / "ran")}, checkpoint_id=folder)
    with pytest.raises(penstock.RuntimeFault, match='cannot read "x"'):
        convert(folder, tmp_path / "ours")
    assert not (tmp_path / "ran").exists()


def test_files_of_dcp_are_in_its_folder(tmp_path):
    folder = tmp_path / "theirs"
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(penstock.RuntimeFault, match="elsewhere"):
        convert(folder, tmp_path / "ours")


def patching(cls, state):
    """A pickle that sets attributes of a class: GLOBAL, the state, BUILD."""
    return f"c{cls.__module__}\n{cls.__qualname__}\n".encode() + pickle.dumps(state)[2:-1] + b"b."


def test_the_metadata_changes_no_class(tmp_path):
    write_dcp(tmp_path / "theirs")
    cls = dcp.metadata.MetadataIndex
    for victim in (cls, pathlib.PurePosixPath, torch.Size):
        made = patching(victim, (None, {"planted": 1}))
        (tmp_path / "theirs" / ".metadata").write_bytes(made)
        with pytest.raises(penstock.RuntimeFault):
            convert(tmp_path / "theirs", tmp_path / "ours")
        assert not hasattr(victim, "planted")


def test_parts_of_dcp_are_the_whole(tmp_path):
    folder = tmp_path / "theirs"
    dcp.save({"model": {"a": torch.ones(8)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([5])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(penstock.RuntimeFault, match="not the whole"):
        convert(folder, tmp_path / "ours")


def test_what_cannot_be_written_as_dcp_leaves_nothing(ours, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(ours[0], damaged)
    manifest = json.loads(next(damaged.rglob("checkpoint.json")).read_text())
    embed = next(one for one in manifest["tensors"] if one["name"] == "embed.weight")
    with open(next(damaged.rglob("*.safetensors")), "r+b") as file:
        file.seek(embed["slices"][0][3])
        file.write(b"damaged")
    with pytest.raises(penstock.RuntimeFault, match="damaged"):
        convert(damaged, tmp_path / "out", Options(to="dcp"))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_torch_runs_nothing(old, tmp_path):
    held = {"a": torch.ones(3), "b": Planted(tmp_path / "ran")}
    torch.save(held, tmp_path / "theirs.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(penstock.ConfigError, match="mkdir"):
        convert(tmp_path / "theirs.pt", tmp_path / "ours")
    assert not (tmp_path / "ran").exists()
