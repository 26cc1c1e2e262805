"""Random models and configs for test_memory_advice.py, and the training of one on a rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCAB = 96
STRATEGIES = ["zero3"] * 3 + ["ddp", "zero1", "zero2", "hpz", "hpz_host", "mics"]
SHARDS_PARAMS = {"zero3", "hpz", "mics"}
SHARDS_GRADS = {"zero2", "zero3", "hpz", "hpz_host", "mics"}


class Block(nn.Module):
    def __init__(self, width: int, times: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(norm))).to(x.dtype)


@dataclass
class Shape:
    """A model: an embedding, blocks and a head that is tied or not."""

    width: int
    widths: list[int]  # by block: the factor of its inner width
    tied: bool
    frozen: str  # "" "tokens" "head" "blocks" "all but last" "norms"
    own: str  # dtypes as built: "fp32" "bf16" "norms fp32"

    def build(self) -> nn.Module:
        return Net(self)


class Net(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(VOCAB, shape.width)
        self.places = nn.Parameter(torch.zeros(8, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, times) for times in shape.widths)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        with torch.no_grad():
            for param in self.parameters():
                if param.ndim > 1:
                    param.normal_(0, 0.02)
        if shape.own != "fp32":
            self.to(torch.bfloat16)
        if shape.own == "norms fp32":
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.float()
        self._freeze(shape.frozen)

    def _freeze(self, what: str) -> None:
        blocks = list(self.blocks)
        norms = [module for module in self.modules() if isinstance(module, nn.LayerNorm)]
        frozen: dict[str, list[nn.Module]] = {
            "": [],
            "tokens": [self.tokens],
            "head": [self.head],
            "blocks": blocks[::2],
            "all but last": [self.tokens, self.head, *blocks[:-1]],
            "norms": norms,
        }
        for module in frozen[what]:
            module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.to(self.norm.weight.dtype)).to(self.head.weight.dtype)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@dataclass
class Draw:
    """What a seed chose. `config` has no budget."""

    world: int
    shape: Shape
    config: dict[str, Any]
    by_torch: bool  # the user's own optimizer
    limits: dict[str, float]  # the budgets by tier, as shares of the predicted bytes


def draw(seed: int) -> Draw:
    """Returns the model, config and budget of a seed."""
    rng = random.Random(seed)
    strategy = rng.choice(STRATEGIES)
    world = rng.choice([1, 2, 2, 2])
    shape = _shape(rng)
    by_torch = rng.random() < 0.1
    offload = _offload(rng, strategy, by_torch)
    accumulate = rng.choice([1, 1, 2, 3])
    config: dict[str, Any] = {
        "strategy": strategy,
        "offload": offload,
        "batch": {"micro": 2, "accumulate": accumulate},
        "units": _units(rng),
        "clip": rng.choice([0.0, 0.5]),
        "comm": {"timeout_s": 30} | rng.choice([{}, {"bucket_bytes": 0}, {"bucket_bytes": 20000}]),
    }
    if rng.random() < 0.5:
        config["prefetch_bytes"] = rng.choice([0, 4096, 40000, 400000])
    if rng.random() < 0.5:
        config["precision"] = rng.choice(["fp32", "bf16", "fp16"])
    if rng.random() < 0.2:
        config["activations"] = {"checkpoint": rng.choice(["unit", 2])}
    if rng.random() < 0.2:
        config["tiling"] = {"max_bytes": rng.choice([8192, 20000])}
        config.pop("activations", None)
    if not by_torch:
        config["optimizer"] = rng.choice(
            [{"type": "AdamW"}, {"type": "SGD", "momentum": 0.9}, {"type": "Lion"}]
        )
        if rng.random() < 0.2:
            config["optimizer"]["moments_dtype"] = "bf16"
    if world == 2 and rng.random() < 0.3:
        config["mesh"] = {"node": 2}
    tiers = rng.choice([["host"], ["device", "host"], ["device", "host"], ["device"]])
    return Draw(world, shape, config, by_torch, {tier: rng.uniform(0.4, 1.1) for tier in tiers})


def _shape(rng: random.Random) -> Shape:
    width = rng.choice([16, 24, 40, 64])
    depth = rng.randint(1, 6)
    widths = [rng.choice([1, 2, 4]) for _ in range(depth)] if rng.random() < 0.4 else [4] * depth
    frozen = rng.choice(["", "", "", "tokens", "head", "blocks", "all but last", "norms"])
    own = rng.choice(["fp32", "fp32", "bf16", "norms fp32"])
    return Shape(width, widths, rng.random() < 0.5, frozen, own)


def _offload(rng: random.Random, strategy: str, by_torch: bool) -> dict[str, Any]:
    offload: dict[str, Any] = {}
    offload["optimizer"] = rng.choice(["none", "host", "disk"])
    if by_torch and offload["optimizer"] == "disk":
        offload["optimizer"] = "host"
    if strategy in SHARDS_PARAMS:
        offload["params"] = rng.choice(["none", "host", "disk"])
    away = offload["optimizer"] != "none"
    if strategy in SHARDS_GRADS:
        offload["gradients"] = rng.choice(["none", "none", "host", "disk" if away else "none"])
    if rng.random() < 0.5 and offload["optimizer"] == "disk":
        offload["window_bytes"] = rng.choice([30000, 100000])
    if strategy in SHARDS_PARAMS and away and rng.random() < 0.3:
        offload["late_update"] = True
    return offload


def _units(rng: random.Random) -> dict[str, Any]:
    units: dict[str, Any] = {}
    if rng.random() < 0.6:
        units["layer_bytes"] = rng.choice([1, 1000, 8000])
    if rng.random() < 0.3:
        units["max_bytes"] = rng.choice([2000, 30000])
    if rng.random() < 0.2:
        units["modules"] = rng.choice([["Block"], ["Linear"], ["LayerNorm", "Linear"]])
    return units


def start(chosen: Draw, folder: str, **others: Any) -> Any:
    """Initializes an engine of the draw; `others` replace keys of its config."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(3)
    model = chosen.shape.build()
    config = chosen.config | others
    if "disk" in config["offload"].values():
        config["offload"] = config["offload"] | {"path": folder}
    optimizer = None
    if chosen.by_torch:
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-3)
    return penstock.initialize(model, config, optimizer=optimizer)


def train(engine: Any, chosen: Draw, steps: int) -> None:
    """Runs whole windows of random tokens."""
    for step in range(steps):
        for micro in range(chosen.config["batch"]["accumulate"]):
            torch.manual_seed(100 * step + micro)
            engine.backward(engine(torch.randint(VOCAB, (2, 8))))
        engine.step()
