"""What activation checkpointing and offload save, and what goes wrong with them."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import resource
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import pytest
import torch
import training
import zoo
from ranks import Failure, Pool
from test_activations import DISK, HOST, MICRO, Setting
from torch import nn
from training import Case
from zoo import Part

# ---- memory


class Wide(nn.Module):
    def __init__(self, watched: list[Any]):
        super().__init__()
        self.line = nn.Linear(256, 256)
        self.watched = watched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.line(x))
        self.watched.append((weakref.ref(x), weakref.ref(inside)))
        return x + torch.sigmoid(torch.exp(inside)) * inside


class Deep(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.watched: list[Any] = []
        self.enter = nn.Linear(256, 256)
        self.blocks = nn.Sequential(*(Wide(self.watched) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.enter(x)).square().mean()


M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(which: str) -> int:
    """Bytes of this process: "VmRSS" now, or "VmHWM" at most since forget_peak()."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{which}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    gc.collect()
    libc = ctypes.CDLL(None)
    # What is freed goes back to the system, so no holes are counted; before the first large tensor.
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def run_deep(overrides: dict[str, Any], folder: str) -> dict[str, int]:
    import penstock  # noqa: PLC0415

    if overrides.get("offload", {}).get("activations") == DISK:
        overrides = overrides | {"offload": overrides["offload"] | {"path": folder}}
    forget_peak()
    depth, rows = 12, 8192
    model = models.fill(Deep(depth))
    engine = penstock.initialize(model, {"strategy": "zero3"} | overrides)
    x = torch.randn(rows, 256)
    engine.backward(engine(x))
    engine.step()
    model.watched.clear()
    forget_peak()
    before = resident("VmRSS")
    loss = engine(x)
    alive = [sum(ref() is not None for ref in kind) for kind in zip(*model.watched, strict=True)]
    engine.backward(loss)
    engine.step()
    peak = resident("VmHWM") - before
    entry = engine.ledger()["measured"]
    engine.close()
    return {"inputs": alive[0], "inside": alive[1], "rss": peak} | entry


def test_memory_falls(tmp_path, record_property):
    unit = {"checkpoint": "unit"}
    settings: dict[str, dict[str, Any]] = {
        "kept": {},
        "every third": {"activations": {"checkpoint": 3}},
        "unit": {"activations": unit},
        HOST: {"activations": unit, "offload": {"activations": HOST}},
        DISK: {"activations": unit, "offload": {"activations": DISK}},
    }
    pool = Pool(1)  # whose heap no other test has used
    try:
        runs = {name: pool.run(run_deep, o, str(tmp_path))[0] for name, o in settings.items()}
    finally:
        pool.close()
    size = 8192 * 256 * 4
    record_property("peak", {name: run["rss"] / size for name, run in runs.items()})
    assert [runs[name]["inside"] for name in ("kept", "every third", "unit")] == [12, 8, 0]
    # Without offload the inputs are what stays; with it nothing does.
    assert runs["unit"]["inputs"] == 12
    assert runs[HOST]["inputs"] == runs[DISK]["inputs"] == 0
    assert runs[HOST]["act"] == 12 * size
    assert runs[DISK]["act"] <= 2 * size
    assert runs[DISK]["disk"] >= 12 * size
    # Of the process: four tensors a block and those of one backward; one a block; none.
    assert runs["kept"]["rss"] > 45 * size
    assert runs["unit"]["rss"] < runs["kept"]["rss"] / 2
    assert runs[DISK]["rss"] < runs["unit"]["rss"] / 1.5


# ---- what goes wrong


class InPlace(zoo.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


class Raising(zoo.Mlp):
    when = "never"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if Raising.when == "forward":
            raise ValueError("in forward")
        if Raising.when == "backward":
            y.register_hook(self.explode)
        return y

    @staticmethod
    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


class Net(zoo.Chain):
    def __init__(self, kind: type[zoo.Mlp]):
        super().__init__(zoo.Mlp(), kind(), zoo.Mlp(), kind())


def start(kind: type[zoo.Mlp], strategy: str, overrides: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    config = {"strategy": strategy, "units": {"modules": ["Mlp", kind.__name__]}}
    return penstock.initialize(models.fill(Net(kind)), config | overrides)


def part_of(step: int) -> Part:
    generator = torch.Generator().manual_seed(step)
    shape = (MICRO["awkward"], models.FEATURES)
    features = torch.randn(shape, generator=generator)
    return features, features.sum(-1)


def in_place(strategy: str, overrides: dict[str, Any]) -> None:
    engine = start(InPlace, strategy, overrides)
    engine.backward(engine(*part_of(0)))


def closed_before_backward(strategy: str, overrides: dict[str, Any]) -> None:
    engine = start(zoo.Mlp, strategy, overrides)
    loss = engine(*part_of(0))
    engine.close()
    loss.backward()


def disk_is_full(strategy: str, overrides: dict[str, Any]) -> None:
    """A process may write no file beyond a block: what a full disk says, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tiers = overrides["offload"]
    if tiers["activations"] != DISK:
        raise OSError("no disk is full")
    engine = start(zoo.Mlp, strategy, overrides)
    part = part_of(0)
    engine.backward(engine(*part))
    before = engine.state_dict()
    engine.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    larger = tuple(tensor.repeat_interleave(4000, 0) for tensor in part)
    try:
        engine.backward(engine(*larger))
    except RuntimeError:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        engine.backward(engine(*part))  # it goes on
        engine.step()
        after = engine.state_dict()
        assert all(not after[name].equal(value) for name, value in before.items())
        gc.collect()
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Refusal(NamedTuple):
    run: Callable[..., None]
    words: list[str]
    kinds: tuple[str, ...] = ("RuntimeFault",)
    tiers: tuple[str, ...] = (HOST, DISK)


REFUSED = {
    "changed in place": Refusal(in_place, ["blocks.1", "changed in place"]),
    "changed in place, not offloaded": Refusal(
        in_place, ["modified by an inplace operation"], ("RuntimeError",), ("none",)
    ),
    "closed": Refusal(
        closed_before_backward, ["close() has freed the saved inputs"], ("RuntimeError",)
    ),
    "full disk": Refusal(disk_is_full, ["cannot hold a swap file of", "free"], tiers=(DISK,)),
}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("name", "tier"), [(name, tier) for name, entry in REFUSED.items() for tier in entry.tiers]
)
def test_refused(name, tier, strategy, pools, tmp_path):
    entry = REFUSED[name]
    setting = Setting(Case(), "unit", tier)
    for outcome in pools(1).attempt(entry.run, strategy, setting.overrides(str(tmp_path))):
        assert isinstance(outcome, Failure), f"went on: {outcome}"
        assert outcome.is_a(*entry.kinds) or "RuntimeError" in entry.kinds, outcome.trace
        for word in entry.words:
            assert word in outcome.text, f"{word!r} is not in {outcome.text!r}"
    assert not list(tmp_path.iterdir())


def after_errors(strategy: str, overrides: dict[str, Any]) -> tuple[list[float], str]:
    """A forward and a backward that raise leave nothing, and training goes on as if nothing was."""
    Raising.when = "never"
    engine = start(Raising, strategy, overrides)
    losses = []
    for step in range(6):
        Raising.when = {2: "forward", 4: "backward"}.get(step, "never")
        try:
            loss = engine(*part_of(step))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        except ValueError as error:
            traceback.clear_frames(error.__traceback__)
        loss = None
        gc.collect()
        assert engine._core.recomputation.saved_bytes == 0
    engine.close()
    return losses, training.digest(engine.module)


@pytest.mark.parametrize("offload", ["none", HOST, DISK])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_errors_leave_nothing(strategy, offload, pools, tmp_path):
    overrides = Setting(Case(), "unit", offload).overrides(str(tmp_path))
    usual = pools(1).run(after_errors, strategy, {})
    assert pools(1).run(after_errors, strategy, overrides) == usual


def evaluate(overrides: dict[str, Any]) -> dict[str, int]:
    engine = start(zoo.Mlp, "zero3", overrides)
    engine.eval()
    with torch.no_grad():
        engine(*part_of(0))
    with torch.inference_mode():
        engine(*part_of(0))
    entry = engine.ledger()["measured"]
    engine.close()
    return entry


def test_evaluation_saves_nothing(pools, tmp_path):
    (entry,) = pools(1).run(evaluate, Setting(Case(), "unit", DISK).overrides(str(tmp_path)))
    assert entry["act"] == entry["disk"] == 0


def one_unit(overrides: dict[str, Any]) -> None:
    import penstock  # noqa: PLC0415

    penstock.initialize(nn.Linear(3, 3), overrides)


def test_a_model_of_one_unit_has_nothing_to_checkpoint(pools):
    (outcome,) = pools(1).attempt(one_unit, {"activations": {"checkpoint": "unit"}})
    assert outcome.is_a("ConfigError"), outcome
    assert "units.modules" in outcome.text
