"""engine.save() and engine.load() at the border with users: nothing in silence."""

from __future__ import annotations

import os
import pathlib

import checkpoints
import pytest
import torch
import torch.distributed as dist
from test_api import initialize
from torch import nn

# ---- at the border


def tiny(config=None, **others):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return initialize(model, {"comm": {"timeout_s": 20}} | (config or {}), **others)


def tiny_step(engine, times=1):
    for _ in range(times):
        x = torch.ones(2, 8, dtype=engine.module[0].weight.dtype)
        engine.backward(engine(x).square().mean())
        engine.step()


def refusals(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    tiny_step(engine)
    engine.backward(engine(torch.ones(2, 8)).mean())
    with pytest.raises(
        penstock.ConfigError, match="middle of a window, so the gradients of 1 of 1"
    ):
        engine.save(folder)
    engine.zero_grad()
    with engine.gathered(write=True), pytest.raises(penstock.ConfigError, match="write=True"):
        engine.save(folder)
    for state, says in (
        ({"a": torch.ones(2)}, r"client_state\['a'\] is a torch.Tensor"),
        ([{1, 2}], r"client_state\[0\] is a builtins.set"),
        (object(), "client_state is a builtins.object"),
    ):
        with pytest.raises(penstock.ConfigError, match=says):
            engine.save(folder, client_state=state)
    for tag in ("", "a/b", "..", "latest", ".hidden"):
        if tag:
            with pytest.raises(penstock.ConfigError, match="cannot name a folder"):
                engine.save(folder, tag=tag)
    with pytest.raises(penstock.ConfigError, match="rank 0 and rank 1 called save"):
        engine.save(folder, tag=f"of-{dist.get_rank()}")
    with pytest.raises(penstock.ConfigError, match="there is no path. Pass one, or set the key"):
        engine.save()
    with pytest.raises(penstock.RuntimeFault, match="no checkpoint that can be loaded"):
        engine.load(folder)
    assert not pathlib.Path(folder).exists() or not list(pathlib.Path(folder).iterdir())
    tiny_step(engine)  # and it goes on
    engine.save(folder)
    with pytest.raises(penstock.RuntimeFault, match='tag "none"'):
        engine.load(folder, tag="none")
    with engine.gathered(), pytest.raises(penstock.ConfigError, match="inside gathered"):
        engine.load(folder)
    engine.close()
    for call in (engine.save, engine.load):
        with pytest.raises(penstock.RuntimeFault, match="closed"):
            call(folder)


def test_what_cannot_be_saved_or_loaded_is_said(pools, tmp_path):
    pools(2).run(refusals, str(tmp_path / "ck"))


def save_in_window(folder, config, wait):
    """A save between two backwards keeps the last step's state and leaves the window alone."""
    config = {"batch": {"accumulate": 3}, "optimizer": {"type": "AdamW", "lr": 0.1}} | config
    seeds = [10 * i + dist.get_rank() for i in range(6)]
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(i)) for i in seeds]

    residual = "table" in config

    def state(engine):
        found = engine.state_dict(rank0_only=False)
        if residual:  # over all ranks
            for name, param in engine.module.named_parameters():
                found[f"residual of {name}"] = engine.param_state(param, "residual")
        return found

    def train(saves):
        torch.manual_seed(0)
        engine = tiny(config)
        for i, batch in enumerate(batches):
            engine.backward(engine(batch.to(engine.module[0].weight.dtype)).square().mean())
            if i == 2:
                engine.step()
                after_step = state(engine)
            if i == 4 and saves:
                engine.save(folder, tag="t", wait=wait, in_window=True)
        engine.step()
        return engine, after_step

    def same(engine, values):
        return all(value.equal(values[name]) for name, value in state(engine).items())

    plain, _ = train(False)
    wanted = state(plain)
    plain.close()
    engine, after_step = train(True)
    assert same(engine, wanted)
    engine.load(folder, tag="t")
    assert same(engine, after_step)
    for batch in batches[3:]:
        engine.backward(engine(batch.to(engine.module[0].weight.dtype)).square().mean())
    engine.step()
    # A load divides residuals among the ranks anew, so the next sums are rounded in another way.
    assert residual or same(engine, wanted)
    x = torch.ones(2, 8, dtype=engine.module[0].weight.dtype, requires_grad=True)
    out = engine(x).square().mean()
    x.register_hook(lambda _: engine.save(folder, in_window=True))
    with pytest.raises(Exception, match="while a backward runs"):
        engine.backward(out)
    engine.close()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "ddp"},
        {"strategy": "zero2", "precision": "bf16"},
        {"strategy": "zero3"},
        {"strategy": "zero3", "offload": {"gradients": "host", "optimizer": "disk"}},
        {"strategy": "zero2", "offload": {"gradients": "disk", "optimizer": "disk"}},
        {"strategy": "zero3", "offload": {"optimizer": "host", "late_update": True}},
        {"strategy": "hpz", "mesh": {"node": 2}, "precision": "bf16"},
        {
            "strategy": "zero2",
            "table": {
                "wire": {"grad": "int4/128/nearest"},
                "residual": {"rest": "PP@device:fp32"},
            },
        },
    ],
    ids=[
        "ddp",
        "zero2 bf16",
        "zero3",
        "host disk",
        "gradients disk",
        "late",
        "hpz",
        "1bit",
    ],  # fmt: skip
)
def test_a_save_in_a_window_has_the_state_after_the_last_step(config, wait, pools, tmp_path):
    if "disk" in config.get("offload", {}).values():
        config = {**config, "offload": {**config["offload"], "path": str(tmp_path)}}
    pools(2).run(save_in_window, str(tmp_path / "ck"), config, wait)


STATES = [
    None,
    {"epoch": 3, "best": 0.1, "nested": [1, (2, "three"), {"4": None}], "big": 2**80},
    {1: "int keys", (2, 3): float("inf")},
    {"$dict": "odd", "nan": [True, -0.0, 1e-320, 5e300]},
]


def round_trip(folder, state):
    engine = tiny()
    engine.save(folder, client_state=state)
    found = engine.load(folder)
    engine.close()
    return found


@pytest.mark.parametrize("state", STATES, ids=str)
def test_client_state_comes_back_as_it_was(state, pools, tmp_path):
    for found in pools(1).run(round_trip, str(tmp_path), state):
        assert repr(found) == repr(state)
        assert found == state


def other_models(folder):
    import penstock  # noqa: PLC0415

    engine = tiny(optimizer={"type": "AdamW"})
    tiny_step(engine)
    engine.save(folder)
    engine.close()

    def error_of(model, optimizer="AdamW", **load):
        other = initialize(model, {"optimizer": {"type": optimizer}, "comm": {"timeout_s": 20}})
        before = other.state_dict(rank0_only=False)
        with pytest.raises(penstock.ConfigError) as error:
            other.load(folder, **load)
        after = other.state_dict(rank0_only=False)
        assert all(before[name].equal(after[name]) for name in before)
        other.backward(other(torch.ones(2, 8)).mean())  # and it goes on
        other.step()
        other.close()
        return str(error.value)

    named = error_of(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)), weights_only=True
    )
    for part in (
        "param/1.weight has shape [8, 8] in the checkpoint and [4, 8] here",
        "param/1.bias has shape [8] in the checkpoint and [4] here",
        "missing in the checkpoint: param/2.weight, param/2.bias",
    ):
        assert part in named, named
    named = error_of(nn.Sequential(nn.Linear(8, 8)), weights_only=True)
    assert "unexpected: param/1.weight, param/1.bias" in named
    assert "optimizer AdamW, but the engine has Adam" in error_of(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "Adam"
    )


def test_another_model_is_refused_with_every_difference(pools, tmp_path):
    pools(2).run(other_models, str(tmp_path))


def weights_alone(folder):
    engine = tiny(optimizer={"type": "SGD", "momentum": 0.9, "lr": 0.1})
    tiny_step(engine, 3)
    engine.save(folder)
    wanted = engine.state_dict(rank0_only=False)
    engine.close()
    other = tiny(optimizer={"type": "AdamW", "lr": 0.5})
    other.load(folder, weights_only=True)
    found = other.state_dict(rank0_only=False)
    assert all(wanted[name].equal(found[name]) for name in wanted)
    assert other.steps == 0
    assert other.lr == 0.5
    tiny_step(other)
    other.close()


def test_weights_alone_go_into_any_optimizer(pools, tmp_path):
    pools(2).run(weights_alone, str(tmp_path))


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def registered(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    counter = Counter(7 + dist.get_rank())
    engine.register_for_checkpointing(counter)
    engine.save(folder)
    counter.count = 0
    engine.load(folder)
    assert counter.count == 7 + dist.get_rank()
    with pytest.raises(penstock.ConfigError, match=r"a list has no state_dict\(\)"):
        engine.register_for_checkpointing([])
    engine.close()
    other = tiny()
    with pytest.raises(
        penstock.ConfigError, match="has 1 registered objects, but the engine has 0"
    ):
        other.load(folder)
    other.close()


def registered_elsewhere(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    engine.register_for_checkpointing(Counter())
    with pytest.raises(penstock.ConfigError, match="different states on the 2 ranks that saved it"):
        engine.load(folder)
    engine.close()


def test_registered_objects(pools, tmp_path):
    pools(2).run(registered, str(tmp_path))
    pools(1).run(registered_elsewhere, str(tmp_path))


# ---- the newest is not always the best


def three(folder, keep=0):
    engine = tiny({"checkpoint": {"path": folder, "keep": keep}})
    assert engine.load("auto") is None
    for _ in range(3):
        tiny_step(engine)
        engine.save(client_state=engine.steps)
    engine.close()


def newest(folder, tag=None):
    """Its client_state, and what was said on stderr."""
    said = f"{folder}.said-{dist.get_rank()}"
    before, into = os.dup(2), os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(into, 2)
    try:
        state = load_newest(folder, tag)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(into)
    return state, pathlib.Path(said).read_text()


def load_newest(folder, tag):
    engine = tiny({"checkpoint": {"path": folder}})
    try:
        state = engine.load("auto", tag)
        tiny_step(engine)
    finally:
        engine.close()
    return state


def damage(kind, checkpoint):
    shard = checkpoint / "rank-00001.safetensors"
    manifest = checkpoint / "checkpoint.json"
    if kind == "a bit":
        data = bytearray(shard.read_bytes())
        data[4096 + 40] ^= 1
        shard.write_bytes(data)
    elif kind == "cut short":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif kind == "no shard":
        shard.unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "another version":
        manifest.write_text(manifest.read_text().replace('_checkpoint":1', '_checkpoint":2'))
    elif kind == "another manifest":
        manifest.write_text(manifest.read_text().replace('"steps":3', '"steps":2'))
    elif kind == "names that lead away":
        manifest.write_text(manifest.read_text().replace("rank-00001.", "../step-1/rank-00001."))
    elif kind == "a folder":
        shard.unlink()
        shard.mkdir()
    else:
        raise ValueError(kind)


DAMAGES = [
    "a bit",
    "cut short",
    "no shard",
    "no manifest",
    "another version",
    "another manifest",
    "names that lead away",
    "a folder",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_is_passed_over_loudly(kind, pools, tmp_path):
    folder = tmp_path / "ck"
    pools(2).run(three, str(folder))
    damage(kind, folder / "step-3")
    (first, said), (second, _) = pools(2).run(newest, str(folder))
    assert first == second == 2
    if kind != "no manifest":  # then it is no checkpoint at all
        assert 'step-3" is skipped' in said
        outcomes = pools(2).attempt(newest, str(folder), "step-3")
        assert all(one.is_a("RuntimeFault") for one in outcomes)


def test_none_is_whole(pools, tmp_path):
    pools(2).run(three, str(tmp_path))
    for step in (1, 2, 3):
        damage("a bit", tmp_path / f"step-{step}")
    for outcome in pools(2).attempt(newest, str(tmp_path)):
        assert outcome.is_a("RuntimeFault")
        assert "no checkpoint that can be loaded" in outcome.text
        assert "is damaged in the" in outcome.text


def unusable_until_loaded(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    with pytest.raises(penstock.RuntimeFault, match="no checkpoint that can be loaded"):
        engine.load(folder, "step-3")
    for call in (lambda: engine(torch.ones(2, 8)), engine.state_dict, lambda: engine.save(folder)):
        with pytest.raises(penstock.RuntimeFault, match="neither the old ones nor those"):
            call()
    assert engine.load(folder, "step-2") == 2
    tiny_step(engine)
    engine.close()


def test_half_loaded_weights_are_not_used(pools, tmp_path):
    pools(2).run(three, str(tmp_path))
    damage("a bit", tmp_path / "step-3")
    pools(2).run(unusable_until_loaded, str(tmp_path))


def test_the_last_are_kept(pools, tmp_path):
    pools(2).run(three, str(tmp_path), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]


# ---- behind training's back


def in_background(folder, config):
    engine = tiny(config)
    tiny_step(engine, 2)
    wanted = engine.state_dict(rank0_only=False)
    engine.save(folder, tag="a", wait=False)
    tiny_step(engine, 3)
    engine.save(folder, tag="b", wait=False)  # waits for the one before
    engine.close()  # and this for that
    again = tiny(config)
    again.load(folder, "a")
    found = again.state_dict(rank0_only=False)
    assert all(wanted[name].equal(found[name]) for name in wanted)
    again.load(folder)
    assert again.steps == 5
    again.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_what_is_saved_is_what_was_there_then(strategy, precision, pools, tmp_path):
    pools(2).run(in_background, str(tmp_path), {"strategy": strategy, "precision": precision})


# ---- from the outside


def test_inspect(pools, tmp_path, capsys):
    from penstock.cli import main  # noqa: PLC0415

    pools(2).run(three, str(tmp_path))
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("health: whole") == 3
    assert "latest: step-3" in said
    assert "step 2, saved by 2 rank(s), strategy zero3" in said
    assert main(["inspect", str(tmp_path / "step-1"), "--tensors", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "param/0.weight" in said
    assert "8x8" in said
    assert "health: not read" in said
    damage("a bit", tmp_path / "step-2")
    assert main(["inspect", str(tmp_path)]) == 1
    assert 'rank-00001.safetensors" is damaged' in capsys.readouterr().out
    damage("another version", tmp_path / "step-3")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "format version 2" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2


def test_the_files_are_safetensors(pools, tmp_path):
    from safetensors.torch import load_file  # noqa: PLC0415

    pools(2).run(three, str(tmp_path))
    folder = tmp_path / "step-3"
    ours = checkpoints.tensors_of(folder)
    for file in checkpoints.manifest_of(folder)["files"]:
        for name, values in load_file(folder / file["name"]).items():
            role = name.partition("/")[0]
            if role in ("pad", "checksums"):
                continue
            key, _, run = name.rpartition("[")
            begin, end = map(int, run.rstrip("]").split(":"))
            assert ours[key].flatten()[begin:end].equal(values)


# ---- what users do to parameters


def edited(folder, config):
    """Weights that were written to before the save; and what is loaded."""
    engine = tiny(config)
    tiny_step(engine, 2)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(0.5).add_(0.25)
    wanted = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.save(folder)
    engine.close()
    other = tiny(config)
    other.load(folder)
    for name, param in other.module.named_parameters():
        assert param.equal(wanted[name]), name
    tiny_step(other)
    other.close()


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_edits_are_saved(strategy, precision, tier, pools, tmp_path):
    config = {"strategy": strategy, "precision": precision}
    if tier != "none":
        config["offload"] = {"optimizer": tier} | (
            {"path": str(tmp_path)} if tier == "disk" else {}
        )
    pools(2).run(edited, str(tmp_path / "ck"), config)


def edited_behind(folder, precision):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    engine = initialize(model, {"strategy": "ddp", "precision": precision})
    wanted = engine.state_dict(rank0_only=False)
    engine.save(folder, wait=False)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # at once, while it is written
    engine.load(folder)
    found = engine.state_dict(rank0_only=False)
    assert all(wanted[name].equal(found[name]) for name in wanted)
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_edited_behind_a_save_is_not_in_it(precision, pools, tmp_path):
    pools(2).run(edited_behind, str(tmp_path), precision)
