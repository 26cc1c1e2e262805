"""engine.save() and engine.load(): any layout into any other, and runs that go on exactly."""

from __future__ import annotations

import itertools
import pathlib
import random

import checkpoints
import models
import pytest
import torch
import torch.distributed as dist
import training
from test_api import initialize
from torch import nn

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hpz"]
WORLDS = [1, 2, 3, 4]
TIERS = ["none", "host", "disk"]
PRECISIONS = ["fp32", "bf16"]
STEPS = 2


def layout(strategy, world, tier, precision, folder):
    config = training.Case(strategy, precision, world=world).config()
    if strategy in training.BY_NODE:
        config["mesh"] = {"node": 2 if world % 2 == 0 else 1}
    if tier != "none":
        config["offload"] = {"optimizer": tier, "path": str(folder)}
        config["offload"] |= {"params": tier} if strategy in ("zero3", "hpz") else {}
        if tier == "disk":
            config["offload"]["window_bytes"] = 16384  # several chunks
        else:
            del config["offload"]["path"]
    return config


def train(engine, steps, first=0):
    world = dist.get_world_size()
    losses = []
    for batch in models.batches("gpt", first + steps, world * training.MICRO)[first:]:
        loss = engine(*training.rank_part(batch, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_trained(config, folder, tag):
    torch.manual_seed(3)
    engine = initialize(models.build("gpt"), config)
    train(engine, STEPS)
    engine.save(folder, tag=tag, client_state={"from": tag})
    engine.close()


def load_and_save(config, source, folder, tag):
    """What was loaded, saved again. Bytes that were read, and those that this rank holds."""
    torch.manual_seed(4)
    engine = initialize(models.build("gpt"), config)
    train(engine, 1)
    state = engine.load(source)
    assert state == {"from": pathlib.Path(source).name}
    engine.save(folder, tag=tag)
    checks = engine._core.checkpoints
    read, held = checks.bytes_read, checks.bytes_held
    losses = train(engine, 1, STEPS)
    engine.close()
    return read, held, losses[0]


def matrix(full):
    """Pairs of layouts in which every strategy and world is source and target."""
    every = list(itertools.product(STRATEGIES, WORLDS, TIERS, PRECISIONS))
    chosen = random.Random(5)
    targets = (
        every
        if full
        else [
            (s, w, chosen.choice(TIERS), chosen.choice(PRECISIONS))
            for s, w in itertools.product(STRATEGIES, WORLDS)
        ]
    )
    sources = [(s, w, chosen.choice(TIERS)) for s, w in itertools.product(STRATEGIES, WORLDS)]
    chosen.shuffle(sources)
    return [((*sources[i % len(sources)], target[3]), target) for i, target in enumerate(targets)]


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        pairs = matrix(metafunc.config.getoption("full"))
        metafunc.parametrize("pair", pairs, ids=lambda p: "-".join(map(str, p[0] + p[1])))


def test_reshape(pair, pools, tmp_path):
    source, target = pair
    saved, again = tmp_path / "saved", tmp_path / "again"
    pools(source[1]).run(save_trained, layout(*source, tmp_path), str(saved), "one")
    found = pools(target[1]).run(
        load_and_save, layout(*target, tmp_path), str(saved / "one"), str(again), "one"
    )
    checkpoints.assert_same_state(saved / "one", again / "one")
    for read, held, _ in found:
        assert read <= 1.1 * held, (read, held)


# ---- the run goes on as if nothing had happened


class Dropping(nn.Module):
    """Random numbers, buffers that ranks have their own of, and state of a module's own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = self.dropout(self.first(x.to(self.first.weight.dtype)))
        self.mean.lerp_(hidden.detach().float().mean(0), 0.1)
        return self.last(hidden - self.mean.to(hidden.dtype)).float()

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def dropping_engine(config, optimizer, scheduled):
    torch.manual_seed(0)
    model = Dropping()
    make = getattr(torch.optim, optimizer)
    schedule = (
        (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=40))
        if scheduled
        else None
    )
    return initialize(model, config, optimizer=lambda p: make(p, lr=0.01), lr_scheduler=schedule)


def go_on(config, optimizer, scheduled, folder, wait):
    """10 losses after a save; and of an engine of its own that loads it."""

    def loss_of(engine):
        x = torch.randn(8, 16)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    torch.manual_seed(100 + dist.get_rank())
    engine = dropping_engine(config, optimizer, scheduled)
    for _ in range(3):
        loss_of(engine)
    engine.save(folder, wait=wait)
    wanted = [loss_of(engine) for _ in range(10)]
    calls = engine.calls
    engine.close()
    again = dropping_engine(config, optimizer, scheduled)
    torch.manual_seed(7)
    loss_of(again)
    again.load(folder)
    assert again.steps == 3
    found = [loss_of(again) for _ in range(10)]
    assert again.calls == calls
    again.close()
    return wanted, found


RESUMES = {
    "zero3": {"strategy": "zero3"},
    "zero2-bf16-host": {
        "strategy": "zero2",
        "precision": "bf16",
        "offload": {"optimizer": "host"},
    },
    "zero1-fp16": {"strategy": "zero1", "precision": "fp16", "loss_scale": {"initial": 256}},
    "ddp": {"strategy": "ddp"},
    "zero3-disk": {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "disk", "params": "disk"},
    },
}
# Those that the engine's kernels compute, and those that run on shards.
OPTIMIZERS = ["AdamW", "SGD", "Adagrad", "NAdam", "RMSprop"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("case", RESUMES)
def test_the_next_losses_are_bitwise_the_same(case, wait, pools, tmp_path):
    config = dict(RESUMES[case])
    if case.endswith("disk"):
        config["offload"] = config["offload"] | {"path": str(tmp_path)}
    for wanted, found in pools(2).run(go_on, config, "AdamW", True, str(tmp_path / "ck"), wait):
        assert wanted == found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_every_optimizer(optimizer, strategy, pools, tmp_path):
    config = {"strategy": strategy, "comm": {"timeout_s": 60}}
    for wanted, found in pools(2).run(go_on, config, optimizer, False, str(tmp_path), True):
        assert wanted == found
