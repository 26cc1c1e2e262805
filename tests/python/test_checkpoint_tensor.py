"""Checkpoints of meshes with tensor ranks: any into any other, bit for bit."""

from __future__ import annotations

import itertools
import random

import checkpoints
import models
import pytest
import tensor_models
import torch
import training
from test_api import initialize

pytestmark = pytest.mark.timeout(480)
# Ranks, tensor ranks.
MESHES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (4, 2)]
LAYOUTS = [("ddp", "none"), ("zero1", "host"), ("zero3", "none"), ("zero3", "disk")]
STEPS = 2


def config_of(world, tensor, strategy, tier, precision, folder):
    config = training.Case(strategy, precision, world=world, model="parts", tensor=tensor).config()
    if tier != "none":
        params = {"params": tier} if strategy == "zero3" else {}
        config["offload"] = {"optimizer": tier} | params
    if tier == "disk":
        config["offload"] |= {"path": str(folder), "window_bytes": 16384}
    return config


def build(seed):
    torch.manual_seed(seed)
    return models.fill(tensor_models.Parts(), seed)


def train(engine, steps, first=0):
    losses = []
    batches = models.batches("gpt", first + steps, 4 * training.MICRO)[first:]
    for batch in batches:
        micro = batch[0].shape[0] // engine.data_size
        own = [part[engine.data_rank * micro :][:micro] for part in batch]
        loss = engine(*own)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_trained(config, folder):
    engine = initialize(build(3), config)
    train(engine, STEPS)
    engine.save(folder, tag="one")
    losses = train(engine, 2, STEPS)
    engine.close()
    return losses


def load_and_save(config, source, folder):
    engine = initialize(build(4), config)
    train(engine, 1)
    engine.load(source)
    engine.save(folder, tag="one")
    weights = engine.state_dict()
    losses = train(engine, 2, STEPS)
    engine.close()
    return losses, {name: value.shape for name, value in weights.items()}


def matrix(full):
    """Pairs of layouts; not both without tensor ranks."""
    every = [(*mesh, *layout) for mesh, layout in itertools.product(MESHES, LAYOUTS)]
    pairs = [(one, two) for one, two in itertools.product(every, every) if one[1] * two[1] > 1]
    if full:
        return pairs
    chosen = random.Random(3)
    meshes = {}
    for one, two in pairs:
        meshes.setdefault((one[:2], two[:2]), []).append((one, two))
    return [chosen.choice(several) for several in meshes.values()]


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        pairs = matrix(metafunc.config.getoption("full"))
        metafunc.parametrize("pair", pairs, ids=lambda p: "-".join(map(str, p[0] + p[1])))


def test_any_into_any(pair, pools, tmp_path):
    source, target = pair
    saved, again = tmp_path / "saved", tmp_path / "again"
    was = pools(source[0]).run(save_trained, config_of(*source, "fp32", tmp_path), str(saved))
    found = pools(target[0]).run(
        load_and_save, config_of(*target, "fp32", tmp_path), str(saved / "one"), str(again)
    )
    checkpoints.assert_same_state(saved / "one", again / "one")
    expected = [sum(losses) / len(was) for losses in zip(*was, strict=True)]
    given = [sum(losses) / len(found) for losses in zip(*(f[0] for f in found), strict=True)]
    assert given == pytest.approx(expected, rel=1e-5)
    whole = {name: value.shape for name, value in tensor_models.Parts().state_dict().items()}
    assert found[0][1] == whole


def test_in_bf16_into_other_ranks(pools, tmp_path):
    saved, again = tmp_path / "saved", tmp_path / "again"
    pools(4).run(save_trained, config_of(4, 2, "zero3", "none", "bf16", tmp_path), str(saved))
    other = config_of(2, 1, "zero2", "none", "bf16", tmp_path)
    pools(2).run(load_and_save, other, str(saved / "one"), str(again))
    checkpoints.assert_same_state(saved / "one", again / "one")


class Small(torch.nn.Module):
    """Fewer rows than tensor ranks, and random numbers."""

    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(3, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, ids):
        return self.dropout(self.kinds(ids)).square().mean()


def small(mesh, folder, loads):
    settings = {"mesh": mesh, "parallel": {"rules": {"kinds": "vocab"}}, "seed": 4}
    engine = initialize(Small(), settings | {"optimizer": {"type": "AdamW"}})
    if loads:
        engine.load(folder)
    for _ in range(2):
        engine.backward(engine(torch.arange(3)))
        engine.step()
    if not loads:
        engine.save(folder)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return weights["kinds.weight"]


@pytest.mark.parametrize(
    ("source", "target"),
    [((4, 4), (4, 4)), ((4, 4), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (4, 2)), ((4, 2), (4, 4))],
)
def test_few_rows_and_random_numbers(source, target, pools, tmp_path):
    for (world, tensor), loads in ((source, False), (target, True)):
        told = pools(world).run(small, {"tensor": tensor}, str(tmp_path / "saved"), loads)
        assert all(weight.equal(told[0]) for weight in told)
