"""A random way to compute one model by several ranks is a pure function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import back_ends
from fuzz_cases import OPTIMIZERS, SCHEDULES

STEPS = 6
# Data ranks, tensor ranks, sizes of pipelines. Sequences in parts need a model of transformers'
# (test_meshes.py has these).
SIZES = [
    (d, t, p)
    for d in (1, 2, 3, 4)
    for t in (1, 2, 3, 4)
    for p in (1, 2, 3, 4)
    if 1 < d * t * p <= 8 and t * p > 1
]
DAILY_WORLD = 4
TIERS = ("none", "host", "disk")


@dataclass(frozen=True)
class MeshCase:
    seed: int
    data: int
    tensor: int
    pipeline: int
    virtual: int
    schedule: str
    node: int
    strategy: str
    hold: str  # the cell param.hold of zero3, or ""
    micro: int
    rows: int  # of the longest micro-batch
    layers: int
    model: tuple[tuple[str, bool], ...]
    frozen: tuple[int, ...]  # blocks
    rules: tuple[tuple[str, str], ...]
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    settings: tuple[tuple[str, Any], ...]

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    def config(self, path: str) -> dict[str, Any]:
        parallel: dict[str, Any] = {"rules": dict(self.rules)} if self.rules else {}
        if self.pipeline > 1:
            parallel |= {"schedule": self.schedule, "virtual_stages": self.virtual}
        mesh = {"tensor": self.tensor, "pipeline": self.pipeline}
        made: dict[str, Any] = {
            "strategy": self.strategy,
            "mesh": mesh | ({"node": self.node} if self.node > 1 else {}),
            "batch": {"accumulate": self.micro},
            "optimizer": {"type": self.optimizer} | dict(self.options),
            "units": {"layer_bytes": 1},
            "comm": {"timeout_s": 120, "backend": back_ends.of_case(self.seed)},
        }
        if self.hold:
            made["table"] = {"param": {"hold": f"{self.hold}@device:fp32"}}
        for key, value in self.settings:
            own = made.get(key, {}) if isinstance(value, dict) else {}
            made[key] = own | value if isinstance(value, dict) else value
        if parallel:
            made["parallel"] = parallel | made.get("parallel", {})
        if "disk" in made.get("offload", {}).values():
            made["offload"]["path"] = path
        return made

    def __str__(self) -> str:
        return "\n".join(f"{f.name}: {getattr(self, f.name)}" for f in fields(self))


def _rules(rng: random.Random, tensor: int) -> dict[str, str]:
    """Width 16, inner width 32, 41 tokens, which no number of ranks divides."""
    made = {}
    if tensor != 3:  # by which the widths do not divide
        style = rng.choice(["pair", "pair", "gathered", "some"])
        if style == "gathered":
            made |= {"*.up": "column_gather", "*.down": "row_cut"}
        elif style == "some":
            made |= {"blocks.0.up": "column", "blocks.0.down": "row"}
        else:
            made |= {"*.up": "column", "*.down": "row"}
    made |= (
        rng.choice([{}, {"tokens": "vocab", "head": "vocab"}])
        if made
        else {
            "tokens": "vocab",
            "head": "vocab",
        }
    )
    return made


def _offload(rng: random.Random, strategy: str, tied: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"optimizer": rng.choice(TIERS)}
    if strategy in ("zero3", "hpz", "mics"):
        made["params"] = rng.choice(TIERS if strategy == "zero3" else TIERS[:2])
        made["late_update"] = made["optimizer"] != "none" and rng.random() < 0.5
        if made["optimizer"] != "none" and not tied:
            made["gradients"] = rng.choice(["none", "disk"])
    if made["optimizer"] == "disk":
        made["window_bytes"] = 1
    return made


def _settings(rng: random.Random, strategy: str, tied: bool, head: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"clip": rng.choice([0.0, 0.3])}
    if rng.random() < 0.5:
        made["prefetch_bytes"] = rng.choice([0, 500, 5000])
    if rng.random() < 0.5:
        made["comm"] = {"bucket_bytes": rng.choice([0, 1000, 20000])}
    if rng.random() < 0.5:
        made["offload"] = _offload(rng, strategy, tied)
    if rng.random() < 0.3:
        made["activations"] = {"checkpoint": "unit"}
        if rng.random() < 0.5:
            made["offload"] = made.get("offload", {}) | {"activations": "host"}
    if rng.random() < 0.3:
        made["schedule"] = rng.choice(SCHEDULES)
    if head and rng.random() < 0.5:
        made["parallel"] = {"cut_logits": True}
    return made


def make(seed: int, largest_world: int = 8) -> MeshCase:
    rng = random.Random(f"mesh {seed}")
    sizes = [one for one in SIZES if one[0] * one[1] * one[2] <= largest_world]
    data, tensor, pipeline = rng.choice(sizes)
    virtual = rng.choice([1, 1, 2]) if pipeline > 1 else 1
    micro = rng.choice([1, 2, 3, 4, 6, 8])
    if virtual > 1:  # interleaving wants whole rounds of micro-batches
        micro = pipeline * rng.choice([1, 2])
    schedules = ["gpipe", "interleaved"] if virtual > 1 else ["gpipe", "1f1b"]
    if micro < pipeline:
        schedules = ["gpipe"]
    grouped = ["hpz", "mics"] if data in (2, 4) else []
    strategy = rng.choice(["ddp", "zero1", "zero2", "zero3", "zero3", *grouped])
    options = {name: rng.random() < 0.3 for name in ("tied", "own", "skip")}
    layers = rng.randint(max(2, pipeline * virtual - 2), 7)
    rules = _rules(rng, tensor) if tensor > 1 else {}
    optimizer = rng.choice(["AdamW", "Adam", "SGD", "Adagrad"])
    settings = _settings(rng, strategy, options["tied"], "head" in rules)
    splits = virtual == tensor == 1 and "activations" not in settings
    if splits and micro >= pipeline > 1:
        schedules.append("zero_bubble")
    return MeshCase(
        seed=seed,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        schedule=rng.choice(schedules),
        node=2 if strategy in ("hpz", "mics") else 1,
        strategy=strategy,
        hold=rng.choice(["", "RR"]) if strategy == "zero3" else "",
        micro=micro,
        rows=rng.randint(2, 4),
        layers=layers,
        model=tuple(options.items()),
        frozen=tuple(i for i in range(layers) if rng.random() < 0.1),
        rules=tuple(rules.items()),
        optimizer=optimizer,
        options=tuple(rng.choice(OPTIMIZERS[optimizer]).items()),
        settings=tuple(settings.items()),
    )
