"""A random case is a pure function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import back_ends
from fuzz_models import KINDS, Shape

SAMPLES = 2  # per rank and forward

# Options that torch's classes, the config and penstock.Lion call by the same name. An eps of 1e-4
# keeps rounding small where a gradient is as good as zero, and so does Lion's small step.
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}, {"lr": 1e-2, "eps": 1e-4}],
    "Adam": [{"lr": 3e-3, "eps": 1e-4}, {"lr": 3e-3, "eps": 1e-4, "betas": (0.7, 0.9)}],
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.02, "momentum": 0.8, "nesterov": True},
        {"lr": 0.02, "momentum": 0.8, "dampening": 0.3},
    ],
    "Adagrad": [{"lr": 0.01, "eps": 1e-4}, {"lr": 0.02, "eps": 1e-4, "lr_decay": 0.1}],
    "Lion": [{"lr": 3e-5, "weight_decay": 0.1}, {"lr": 3e-5, "betas": (0.8, 0.95)}],
    "RMSprop": [{"lr": 1e-3, "eps": 1e-2, "momentum": 0.5}],
}
SCHEDULES: list[dict[str, Any]] = [
    {"type": "linear", "warmup_steps": 2, "total_steps": 5, "min_ratio": 0.1},
    {"type": "cosine", "total_steps": 4, "min_ratio": 0.2},
    {"type": "constant", "warmup_steps": 3},
]
# One forward's worth of a loop (fuzz_loop.py): how many backwards it makes.
MICROS = {
    "plain": 1,
    "contrast": 1,
    "penalty": 1,
    "vector": 1,
    "late": 2,
    "losses": 2,
    "retain": 2,
}


@dataclass(frozen=True)
class Step:
    """One window of the loop."""

    micros: tuple[str, ...]
    depth: int  # of the model's calls, how many are made
    frozen: tuple[int, ...] = ()  # blocks, in this step
    lr_factor: float = 1.0  # the user changes lr
    edit: bool = False  # gradients are replaced
    evaluate: bool = False  # before the step

    def __str__(self) -> str:
        others = [f.name for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        told = [f"{name}={getattr(self, name)}" for name in others]
        return " ".join([*self.micros, f"depth={self.depth}", *told])


@dataclass(frozen=True)
class Case:
    seed: int
    world: int
    strategy: str
    precision: str
    accumulate: int
    clip: float
    shape: Shape
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    given: str  # the optimizer as "config", "object" or "callable"
    groups: int  # of parameters
    schedule: tuple[tuple[str, Any], ...]  # () is none
    settings: tuple[tuple[str, Any], ...]  # other config keys
    steps: tuple[Step, ...]

    def config(self) -> dict[str, Any]:
        config = {
            "strategy": self.strategy,
            "precision": self.precision,
            "batch": {"micro": SAMPLES, "accumulate": self.accumulate},
            "clip": self.clip,
            "mesh": {"node": 2} if self.strategy in ("hpz", "mics") else {},
            "comm": {"timeout_s": 120, "backend": back_ends.of_case(self.seed)},
        }
        for key, value in self.settings:
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        if self.schedule:
            config["schedule"] = dict(self.schedule)
        if self.given == "config":
            config["optimizer"] = {"type": self.optimizer, **dict(self.options)}
        return config

    def __str__(self) -> str:
        lines = [f"{f.name}: {getattr(self, f.name)}" for f in fields(self)[:-1]]
        return "\n".join([*lines, *(f"step {i}: {s}" for i, s in enumerate(self.steps))])


def make(seed: int) -> Case:
    rng = random.Random(seed)
    world = rng.choice([1, 2, 2, 3, 4, 4])
    strategies = ["ddp", "zero1", "zero2", "zero3", "zero3"] + ["hpz", "mics"] * (world == 4)
    precision = rng.choice(["fp32"] * 4 + ["bf16"])
    kinds = [kind for kind in OPTIMIZERS if precision == "fp32" or kind != "Lion"]
    optimizer = rng.choice(kinds)
    given = rng.choice(["config", "object", "callable"])
    if optimizer == "RMSprop" and given == "config":
        given = "object"
    shape = _shape(rng)
    accumulate = rng.choice([1, 1, 2, 3, 4])
    schedule = rng.choice(SCHEDULES) if rng.random() < 0.3 else {}
    strategy = rng.choice(strategies)
    return Case(
        seed=seed,
        world=world,
        strategy=strategy,
        precision=precision,
        accumulate=accumulate,
        clip=rng.choice([0.0, 0.3]),
        shape=shape,
        optimizer=optimizer,
        options=tuple(rng.choice(OPTIMIZERS[optimizer]).items()),
        given=given,
        groups=1 if given == "config" else rng.choice([1, 2]),
        schedule=tuple(schedule.items()),
        settings=_settings(rng, shape, strategy, native=optimizer != "RMSprop"),
        steps=_steps(rng, shape, accumulate, changes_lr=not schedule),
    )


def _shape(rng: random.Random) -> Shape:
    some = rng.sample(list(KINDS), rng.randint(1, 3))
    blocks = tuple(rng.choice(some) for _ in range(rng.randint(2, 5)))
    indices = range(len(blocks))
    order = [i for i in indices if i == 0 or rng.random() < 0.9]
    if rng.random() < 0.4:
        order.insert(rng.randint(0, len(order)), rng.choice(order))
    pairs = [(i, j) for i in indices for j in indices if i < j and blocks[i] == blocks[j]]
    tokens = rng.random() < 0.5
    return Shape(
        width=rng.choice([5, 7, 9, 12]),
        tokens=tokens,
        blocks=blocks,
        order=tuple(order),
        frozen=tuple(i for i in indices if rng.random() < 0.15),
        tied=rng.choice(pairs) if pairs and rng.random() < 0.3 else (),
        tied_head=tokens and rng.random() < 0.5,
        outside=rng.random() < 0.3,
        recompute=rng.choice(["off", "off", "reentrant", "nonreentrant"]),
    )


def _offload(rng: random.Random, strategy: str, native: bool) -> dict[str, Any]:
    offload: dict[str, Any] = {
        "optimizer": rng.choice(["none", "host", "disk" if native else "host"])
    }
    if strategy in ("zero3", "hpz", "mics"):
        offload["params"] = rng.choice(["none", "host", "host" if strategy == "hpz" else "disk"])
        if offload["optimizer"] != "none":
            offload["gradients"] = rng.choice(["none", "disk"])
        offload["late_update"] = offload["optimizer"] != "none" and rng.random() < 0.5
    if offload["optimizer"] == "disk":
        offload["window_bytes"] = 1  # chunks as small as they can be
    return offload


def _settings(
    rng: random.Random, shape: Shape, strategy: str, native: bool
) -> tuple[tuple[str, Any], ...]:
    settings: dict[str, Any] = {}
    units = rng.choice(["found", "found", "named", "small"])
    if units == "named":
        settings["units"] = {"modules": [rng.choice(shape.blocks)]}
    if units == "small":
        settings["units"] = {"max_bytes": rng.choice([100, 1000])}
    if rng.random() < 0.6:
        settings["prefetch_bytes"] = rng.choice([0, 500, 5000])
    if rng.random() < 0.6:
        settings["comm"] = {"bucket_bytes": rng.choice([0, 1000, 20000])}
    if rng.random() < 0.5:
        settings["offload"] = _offload(rng, strategy, native)
    return tuple(settings.items())


def _steps(rng: random.Random, shape: Shape, accumulate: int, changes_lr: bool) -> tuple[Step, ...]:
    kinds = list(MICROS)
    if shape.tokens or shape.recompute == "reentrant":  # torch itself refuses
        kinds.remove("penalty")
    kinds = ["plain", *rng.sample(kinds, rng.randint(1, 3))]
    whole = len(shape.order)
    edits, freezes, shallow = (rng.random() < 0.3 for _ in range(3))
    steps = []
    for _ in range(rng.randint(4, 6)):
        backwards = accumulate  # often; else an incomplete window, or one with more
        if rng.random() < 0.3:
            backwards = rng.randint(1, accumulate + 2)
        micros = [rng.choice(kinds)]
        while sum(MICROS[kind] for kind in micros) < backwards:
            micros.append(rng.choice(kinds))
        steps.append(
            Step(
                micros=tuple(micros),
                depth=rng.randint(1, whole) if shallow and rng.random() < 0.5 else whole,
                frozen=tuple(
                    i for i in range(len(shape.blocks)) if freezes and rng.random() < 0.25
                ),
                lr_factor=0.5 if changes_lr and rng.random() < 0.2 else 1.0,
                edit=edits and rng.random() < 0.5,
                evaluate=rng.random() < 0.2,
            )
        )
    return tuple(steps)
