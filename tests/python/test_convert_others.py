"""penstock convert: checkpoints of torch, of its DCP and of Hugging Face, in and out."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import pickle
import shutil

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
import trained
from converted import STEPS, engine_of, losses_of
from safetensors.torch import load_file, save_file
from test_api import initialize
from test_convert import DEEPSPEED, Planted
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import penstock
from penstock.cli import main
from penstock.conversion import Options, convert

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
    with pytest.raises(penstock.RuntimeFault, match="outside"):
        convert(folder, tmp_path / "never")


@pytest.mark.parametrize("kind", ["RAdam", "NAdam", "Adamax", "RMSprop", "SGD", "AdamW"])
def test_other_optimizers_go_on(kind, tmp_path):
    options = {
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.5},
        "AdamW": {"amsgrad": True},
    }.get(kind, {})

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


def test_a_scheduler_that_keeps_a_counter(tmp_path):
    model, optimizer = plain_run()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 4])
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held | {"scheduler": schedule.state_dict()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out")
    model = trained.Model()
    optimizer = torch.optim.AdamW(trained.groups(model), **trained.GROUPS)
    other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    engine = initialize(model, {}, optimizer=optimizer, lr_scheduler=other)
    engine.load(tmp_path / "out")
    assert other.milestones == schedule.milestones
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
    assert "load it with load()" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path)]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path)]) == 2
    assert "not a checkpoint of a known format" in capsys.readouterr().err


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


class Fetched:
    """In a pickle, getattr() of something else than an enum."""

    def __reduce__(self):
        return getattr, (torch.Size([1]), "count")


def test_members_of_enums_by_getattr(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle members of enums so."""
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    by_name = lambda self, protocol: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(encoding, "__reduce_ex__", by_name)
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours")
    metadata = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    metadata.planner_data = Fetched()
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(penstock.ConfigError, match=r"builtins\.getattr"):
        convert(tmp_path / "theirs", tmp_path / "other")


def test_files_of_dcp_are_in_its_folder(tmp_path):
    folder = tmp_path / "theirs"
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(penstock.RuntimeFault, match="outside"):
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
    with pytest.raises(penstock.RuntimeFault, match="not add up to the whole"):
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


# ---- what is asked for wrongly


def test_a_tensor_beside_the_weights_is_not_the_model(tmp_path):
    torch.save({"net": trained.Model().state_dict(), "loss": torch.tensor(0.5)}, tmp_path / "a.pt")
    with pytest.raises(penstock.ConfigError, match='"net"'):
        convert(tmp_path / "a.pt", tmp_path / "out")
    convert(tmp_path / "a.pt", tmp_path / "out", Options(key="net"))


def test_a_module_called_state_is_no_optimizer(tmp_path):
    model = torch.nn.ModuleDict({"state": torch.nn.Linear(2, 2), "out": torch.nn.Linear(2, 2)})
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    made = convert(tmp_path / "a.pt", tmp_path / "w.bin", Options(to="torch"))
    model.load_state_dict(torch.load(made, weights_only=True))


def test_numbers_of_numpy_are_in_nobodys_way(tmp_path):
    held = {"model": trained.Model().state_dict(), "best": numpy.float64(0.5), "epoch": 3}
    torch.save(held, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out")
    engine = engine_of()
    assert engine.load(tmp_path / "out", weights_only=True)["epoch"] == 3
    engine.close()


def test_the_file_that_transformers_takes(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(2)}, tmp_path / "old.bin")
    index = {"weight_map": {"a": "old.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    made = convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.bin", Options(to="torch"))
    assert torch.load(made, weights_only=True)["a"].equal(torch.ones(2))


def test_what_is_no_place_for_the_result(ours, tmp_path):
    source = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, source)
    os.mkfifo(tmp_path / "pipe")
    for out in (source, tmp_path / "pipe", tmp_path):
        with pytest.raises(penstock.ConfigError, match="cannot write|is a folder"):
            convert(source, out, Options(to="torch"))
    assert torch.load(source, weights_only=True)["a"].equal(torch.ones(2))
    with pytest.raises(penstock.ConfigError, match="not the name of a folder"):
        convert(ours[0], tmp_path / "out", Options(to="torch", tag="../x"))


def test_registered_objects_stay(tmp_path):
    torch.save({"model": trained.Model().state_dict()}, tmp_path / "a.pt")
    convert(DEEPSPEED / "zero2-fp32", tmp_path / "out")
    engine = engine_of()
    loader = penstock.ResumableLoader(list(range(8)), batch_size=2)
    engine.register_for_checkpointing(loader)
    with pytest.warns(RuntimeWarning, match="no registered objects"):
        engine.load(tmp_path / "out")
    engine.save(tmp_path / "again")
    engine.load(tmp_path / "again")
    engine.close()
