"""engine.export_hf(): what from_pretrained() makes of it, and what is in the files."""

from __future__ import annotations

import json
import pathlib

import hugging_face as hf
import models
import peft
import pytest
import torch
import torch.distributed as dist
from hugging_face import KINDS, build
from safetensors.torch import load_file
from test_api import initialize, start
from test_transformers import adapted, logits, tuned
from torch import nn


def loads(kind, folder, **options):
    return KINDS[kind][1].from_pretrained(folder, output_loading_info=True, **options)


def exported(kind, strategy, folder):
    """Loading info of each export, and how far its logits are from a plain model's."""
    rank = dist.get_rank()
    engine = hf.start(strategy, build(kind), {})
    tuned(engine, kind, rank)
    plain = build(kind)
    plain.load_state_dict(engine.state_dict(rank0_only=False))
    engine.export_hf(f"{folder}/one")
    engine.export_hf(f"{folder}/parts", max_shard_bytes=20_000)
    engine.export_hf(f"{folder}/low", dtype=torch.bfloat16)
    tuned(engine, kind, rank, 1, 2)  # and it goes on
    engine.close()
    dist.barrier()
    said = {}
    wanted = logits(plain.eval(), kind, rank)
    for name in ("one", "parts"):
        model, info = loads(kind, f"{folder}/{name}")
        said[name] = (info, logits(model, kind, rank).equal(wanted))
    model, info = loads(kind, f"{folder}/low", dtype=torch.bfloat16)
    said["low"] = (info, model.dtype == torch.bfloat16)
    if rank == 0:
        plain.save_pretrained(f"{folder}/plain")
        config, low, wanted = (
            json.loads(pathlib.Path(folder, one, "config.json").read_text())
            for one in ("one", "low", "plain")
        )
        said["config"] = (info, config == wanted and low["dtype"] == "bfloat16")
    return said


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [*((kind, "zero3") for kind in KINDS), ("gpt2", "ddp"), ("llama", "zero2")],
)
def test_from_pretrained_finds_everything(kind, strategy, pools, tmp_path):
    for said in pools(2).run(exported, kind, strategy, str(tmp_path)):
        for info, same in said.values():
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert not info["mismatched_keys"]
            assert same


def merged(folder):
    rank = dist.get_rank()
    engine = hf.start("zero3", adapted("llama"), {})
    tuned(engine, "llama", rank)
    engine.close()
    whole = engine.module.merge_and_unload()
    assert not isinstance(whole, peft.PeftModel)
    again = initialize(whole.requires_grad_(True), {"strategy": "zero3"})
    wanted = logits(again, "llama", rank)
    again.export_hf(folder)
    again.close()
    dist.barrier()
    model, info = loads("llama", folder)
    return info, logits(model, "llama", rank).equal(wanted)


def test_a_merged_adapter(pools, tmp_path):
    for info, same in pools(2).run(merged, str(tmp_path)):
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert same


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def plain_files(folder, config):
    torch.manual_seed(0)
    engine = initialize(Buffered(), {"units": {"modules": ["Embedding"]}} | config)
    engine.backward(engine(torch.arange(64)).square().mean())
    engine.step()
    wanted = engine.state_dict(rank0_only=False)
    engine.export_hf(folder, dtype=torch.float32, max_shard_bytes=500)
    engine.export_hf(f"{folder}/one", dtype=torch.float32)
    engine.export_hf(folder, dtype=torch.float32)  # in place of the shards
    left = sorted(p.name for p in pathlib.Path(folder).glob("*.*"))
    engine.export_hf(folder, dtype=torch.float32, max_shard_bytes=500)
    engine.close()
    return wanted, left


@pytest.mark.parametrize("config", [{}, {"tiling": {"max_bytes": 600}}], ids=["whole", "tiled"])
def test_what_is_in_the_files(config, pools, tmp_path):
    (wanted, left), _ = pools(2).run(plain_files, str(tmp_path), config)
    assert left == ["model.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / name)
    assert set(found) == set(wanted) - {"head.weight"}  # tied: once
    assert all(found[name].equal(wanted[name]) for name in found)
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == found.keys()
    assert not list(tmp_path.rglob("*.part"))


def refused(folder):
    import penstock  # noqa: PLC0415

    engine = start(model="gpt")
    with pytest.raises(penstock.ConfigError, match=r"torch\.int8"):
        engine.export_hf(folder, dtype=torch.int8)
    file = pathlib.Path(folder) / f"file-{dist.get_rank()}"
    file.write_text("in the way")
    with pytest.raises(penstock.RuntimeFault, match=r"rank 0: .*file-0"):
        engine.export_hf(pathlib.Path(folder) / "file-0" / "model")
    engine.backward(engine(*models.batches("gpt", 1, 2)[0]))
    engine.step()
    engine.close()


def test_what_cannot_be_written_is_said_on_every_rank(pools, tmp_path):
    pools(2).run(refused, str(tmp_path))
