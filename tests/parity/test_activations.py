"""Activation checkpointing and offload change no bit: against the same run with neither."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
from typing import Any, NamedTuple

import cases
import models
import pytest
import test_loops
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
import zoo
from torch import nn
from training import Case
from zoo import Part, Place

HOST, DISK = "host", "disk"
# Samples per rank and backward with which a unit's inputs are large enough to be moved.
MICRO = {"gpt": 12, "awkward": 320}
SAMPLE = 70


class Dropped(zoo.Chain):
    """Dropout inside and around the units, and noise."""

    def __init__(self) -> None:
        super().__init__(*(DroppedMlp() for _ in range(4)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().between(F.dropout(x, 0.1)), 0.1)


class DroppedMlp(zoo.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.01 * torch.randn_like(x)
        return F.dropout(super().forward(F.dropout(x, 0.2)), 0.2)


ENTRIES = zoo.ENTRIES | {"dropped": zoo.Entry(Dropped)}
MODELS = [*zoo.EVERYWHERE, "dropped"]


class Setting(NamedTuple):
    """A case, and what is done about its activations."""

    case: Case
    checkpoint: str | int
    offload: str

    def overrides(self, folder: str) -> dict[str, Any]:
        offload = {"activations": self.offload}
        if self.offload == DISK:
            offload["path"] = folder
        return {"activations": {"checkpoint": self.checkpoint}, "offload": offload}

    def __str__(self) -> str:
        return f"{self.case}-{self.checkpoint}-{self.offload}"


def matrix() -> list[Setting]:
    layouts = [
        (world, strategy)
        for world in (1, 2, 3, 4)
        for strategy in (["hpz"] if world == 4 else cases.STRATEGIES)
    ]
    return [
        Setting(Case(strategy, precision, accumulate, world, model=model), checkpoint, offload)
        for world, strategy in layouts
        for model in MODELS
        for precision in ENTRIES[model].precisions
        if precision != "fp16"
        for accumulate in cases.ACCUMULATE
        for checkpoint in ("unit", 2, 3)
        for offload in ("none", HOST, DISK)
    ]


def sample(limit: int) -> list[Setting]:
    """Every model and every layout with every way, then every pair of values as far as it goes."""

    @dataclasses.dataclass(frozen=True)
    class Flat(Case):
        checkpoint: str | int = "unit"
        offload: str = "none"

    flat = [Flat(**vars(one.case), checkpoint=one[1], offload=one[2]) for one in matrix()]
    chosen = cases._sample(flat, lambda one: (one.model, one.offload), limit)
    return [
        Setting(
            Case(**{f.name: getattr(one, f.name) for f in dataclasses.fields(Case)}),
            one.checkpoint,
            one.offload,
        )
        for one in chosen
    ]


def parts_of(model: str, accumulate: int) -> list[list[Part]]:
    """By step, this rank's micro-batches."""
    entry, world = ENTRIES[model], dist.get_world_size()
    size = MICRO[entry.data]
    parts = []
    for batch in models.batches(entry.data, entry.steps, size * world * accumulate):
        split = list(zip(*(tensor.split(size) for tensor in batch), strict=True))
        parts.append(split[dist.get_rank() :: world])
    return parts


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    left: str  # digest of the model after close()
    entry: dict[str, int]
    explained: str


def train(case: Case, overrides: dict[str, Any]) -> Outcome:
    import penstock  # noqa: PLC0415

    entry, rank = ENTRIES[case.model], dist.get_rank()
    torch.manual_seed(100 + rank)
    config = case_config(case)
    model = models.fill(entry.make(), 7)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    engine = penstock.initialize(model, config | overrides)
    losses, norms = [], []
    for step, parts in enumerate(parts_of(case.model, case.accumulate)):
        for part in parts:
            loss = entry.loss(engine, part, Place(step, rank))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(engine.grad_norm)
    del loss
    assert engine._core.recomputation.saved_bytes == 0
    weights = engine.state_dict()
    buffers = dict(model.named_buffers())
    measured, explained = engine.ledger()["measured"], engine.explain()
    engine.close()
    for name, module in model.named_modules():
        assert set(module.__dict__) == before[name], name
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
    return Outcome(losses, norms, weights, buffers, training.digest(model), measured, explained)


def case_config(case: Case) -> dict[str, Any]:
    known = dataclasses.replace(case, model=case.model if case.model in zoo.ENTRIES else "gpt")
    return known.config() | {"units": {"modules": ENTRIES[case.model].units}}


def assert_same_bits(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert one.left == other.left
        for mine, expected in ((one.weights, other.weights), (one.buffers, other.buffers)):
            assert mine.keys() == expected.keys()
            for name, value in mine.items():
                assert value.equal(expected[name]), name


@pytest.fixture(scope="module")
def usual(pools):
    """The run that keeps its activations."""

    @functools.cache
    def run(case: Case) -> list[Outcome]:
        return pools(case.world).run(train, case, {})

    return run


def pytest_generate_tests(metafunc):
    if "setting" in metafunc.fixturenames:
        chosen = sample(10 * SAMPLE if metafunc.config.getoption("full") else SAMPLE)
        metafunc.parametrize("setting", chosen, ids=str)


def test_bits_are_those_of_kept_activations(setting, pools, usual, tmp_path):
    ours = pools(setting.case.world).run(train, setting.case, setting.overrides(str(tmp_path)))
    assert_same_bits(ours, usual(setting.case))
    entry, explained = ours[0].entry, ours[0].explained
    assert (entry["act"] > 0) == (setting.offload != "none")
    assert (entry["disk"] > 0) == (setting.offload == DISK)
    assert ("u1 act copy(device,host)" in explained) == (setting.offload != "none")
    assert not list(tmp_path.iterdir()), "a swap file has a name"


@pytest.mark.parametrize("offload", [HOST, DISK])
@pytest.mark.parametrize("params", ["none", DISK])
def test_beside_other_state_on_disk(params, offload, pools, usual, tmp_path):
    case = Case("zero3", "fp32", 3, 2, model="gpt")
    tiers = {"optimizer": DISK, "params": params, "activations": offload, "path": str(tmp_path)}
    overrides = {"activations": {"checkpoint": "unit"}, "offload": tiers}
    assert_same_bits(pools(2).run(train, case, overrides), usual(case))


@pytest.mark.parametrize("offload", ["none", HOST, DISK])
@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_around_and_inside_the_users_own_checkpoints(strategy, recompute, offload, pools, tmp_path):
    setting = Setting(Case(strategy, "fp32", 1, 2, recompute, "gpt"), "unit", offload)
    usual = pools(2).run(train_recomputed, setting.case, {})
    ours = pools(2).run(train_recomputed, setting.case, setting.overrides(str(tmp_path)))
    assert ours == usual


def train_recomputed(case: Case, overrides: dict[str, Any]) -> tuple[list[float], str]:
    import penstock  # noqa: PLC0415

    model = zoo.build(case.model, case.recompute)
    engine = penstock.initialize(model, case.config() | overrides)
    losses = []
    for (part,) in parts_of(case.model, 1)[:4]:
        loss = engine(*part)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    del loss
    assert engine._core.recomputation.saved_bytes == 0
    engine.close()
    return losses, training.digest(model)


# ---- loops


def abandoned(engine: Any, data: test_loops.Data) -> None:
    """Forwards that no backward follows, and a graph that lives on for a step."""
    kept = None
    for (part,) in data:
        test_loops.loss_of(engine, part)
        old, kept = kept, test_loops.loss_of(engine, part)
        engine.backward(test_loops.loss_of(engine, part))
        engine.step()
        del old


LOOPS = test_loops.LOOPS | {"abandoned": test_loops.Loop(abandoned)}


def run_loop(name: str, strategy: str, overrides: dict[str, Any]) -> tuple[dict, list[float]]:
    torch.manual_seed(0)
    loop = LOOPS[name]
    size = loop.micros * test_loops.WORLD * MICRO["awkward"]
    split = [
        list(zip(*(t.split(MICRO["awkward"]) for t in batch), strict=True))
        for batch in models.batches("awkward", test_loops.STEPS, size)
    ]
    data = [step[dist.get_rank() :: test_loops.WORLD] for step in split]
    engine = test_loops.start(strategy, loop.accumulate, **overrides)
    numbers = loop.run(engine, data) or []
    gc.collect()
    assert engine._core.recomputation.saved_bytes == 0
    assert (engine.ledger()["measured"]["act"] > 0) == ("offload" in overrides)
    weights = engine.state_dict()
    engine.close()
    return weights, numbers


@pytest.mark.parametrize("offload", ["none", HOST, DISK])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop(name, strategy, offload, pools):
    activations = {"activations": {"checkpoint": "unit"}}
    if offload != "none":
        activations["offload"] = {"activations": offload}
    ours = pools(2).run(run_loop, name, strategy, activations)
    usual = pools(2).run(run_loop, name, strategy, {})
    for (weights, numbers), (expected, their_numbers) in zip(ours, usual, strict=True):
        assert numbers == their_numbers
        for key, value in weights.items():
            assert value.equal(expected[key]), key


# ---- what units are given


@dataclasses.dataclass(frozen=True)
class Given:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Opaque:
    def __init__(self, bias: torch.Tensor):
        self.bias = bias


class Taker(nn.Module):
    """Takes tensors in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("scale", torch.ones(64))
        self.calls, self.runs = 0, types.SimpleNamespace(count=0)

    def forward(self, given: Given, *more: Any, mask: torch.Tensor, log: list[int], **named: Any):
        self.calls += 1
        self.runs.count += 1  # an object is not as before when the block runs again
        log.append(len(log))
        assert log in ([0], [0, 1], [0, 1, 2]), "the list has been changed by another run"
        with torch.no_grad():
            self.mean.mul_(0.9).add_(given.hidden.mean(dim=(0, 1)))
            self.scale = 0.5 * self.scale + 0.5
        x = given.hidden * mask.transpose(0, 1) + more[0][0] + more[0][1].bias
        x = self.line(x * self.scale - self.mean) + named["views"]["half"].sum()
        return {"x": torch.tanh(x), "count": given.extra["count"] + 1}


class Takers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Taker() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach().transpose(0, 1) > 0).float()  # not contiguous, given to every block
        log: list[int] = []
        for count, block in enumerate(self.blocks):
            extra = {"count": count, "none": None}
            views = {"half": x[:, :16].expand(2, -1, 16, 64), "whole": x}
            out = block(
                Given(x, extra), (x * 0.5, Opaque(self.bias)), mask=mask, log=log, views=views
            )
            assert out["count"] == count + 1
            x = out["x"] + x
        assert log == [0, 1, 2]
        return x.square().mean()


def run_takers(strategy: str, overrides: dict[str, Any]) -> tuple[list[float], str, list[int], int]:
    import penstock  # noqa: PLC0415

    model = models.fill(Takers())
    engine = penstock.initialize(model, {"strategy": strategy} | overrides)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(8, 32, 64)
        loss = engine(x)
        losses.append(loss.item())
        engine.backward(loss, retain_graph=step % 2 == 0)
        if step % 2 == 0:
            engine.backward(loss)
        engine.step()
    del loss
    gc.collect()
    assert engine._core.recomputation.saved_bytes == 0
    assert [block.calls for block in model.blocks] == [4, 4, 4]  # as in torch
    runs, act = [block.runs.count for block in model.blocks], engine.ledger()["measured"]["act"]
    engine.close()
    digest = training.digest(model) + str([b.sum().item() for b in model.buffers()])
    return losses, digest, runs, act


@pytest.mark.parametrize("every", ["unit", 2])
@pytest.mark.parametrize("offload", ["none", HOST, DISK])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_inputs_of_every_kind(strategy, offload, every, pools):
    overrides = {"activations": {"checkpoint": every}, "offload": {"activations": offload}}
    usual = pools(2).run(run_takers, strategy, {})
    ours = pools(2).run(run_takers, strategy, overrides)
    for one, other in zip(ours, usual, strict=True):
        assert one[:2] == other[:2]
    # Four forwards, and six backwards.
    assert usual[0][2] == [4, 4, 4]
    assert ours[0][2] == ([10, 10, 10] if every == "unit" else [10, 4, 10])
    hidden = 8 * 32 * 64 * 4
    if offload == HOST and every == "unit":  # x and x / 2 a block; the mask once, and no view
        assert ours[0][3] == 7 * hidden


class Aside(nn.Module):
    """Leaves a loss on itself, as routers do: no output tells when its backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = torch.tanh(self.down(torch.tanh(self.up(x)))).square().mean()
        return x * 2


class Asides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(Aside() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks(self.enter(x))
        return sum(block.loss for block in self.blocks)


def run_asides(strategy: str, overrides: dict[str, Any]) -> tuple[list[float], str]:
    import penstock  # noqa: PLC0415

    model = models.fill(Asides())
    engine = penstock.initialize(model, {"strategy": strategy} | overrides)
    losses = []
    for step in range(4):
        loss = engine(torch.randn(64, 64, generator=torch.Generator().manual_seed(step)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.close()
    return losses, training.digest(model)


@pytest.mark.parametrize("offload", ["none", DISK])
def test_a_unit_whose_output_leads_nowhere_is_whole_when_it_runs_again(offload, pools):
    overrides = {"activations": {"checkpoint": "unit"}, "offload": {"activations": offload}}
    usual = pools(2).run(run_asides, "ddp", {})
    assert pools(2).run(run_asides, "zero3", overrides) == usual
