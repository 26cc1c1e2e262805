"""Frozen parameters beside layers in tiles train like plain torch: the backward reads a frozen
weight after the tiles of its own block."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(480)
WIDTH, ROWS, STEPS, ACCUMULATE = 8, 12, 2, 2
TILES = {"tiling": {"max_bytes": 256}}
HELD = {"table": {"param": {"hold": "RR@device:fp32"}}}
LAYERS = {"units": {"layer_bytes": 1}}
UNIT = {"activations": {"checkpoint": "unit"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            if self.recompute == "pairs":
                if index % 2 == 0:
                    x = checkpoint(self.pair, index, x, use_reentrant=False)
            elif self.recompute in ("reentrant", "nonreentrant"):
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def pair(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[index + 1](self.blocks[index](x))


def freeze(model: Net, what: str) -> None:
    blocks = list(model.blocks)
    frozen: dict[str, list[nn.Module | nn.Parameter]] = {
        "nothing": [],
        "even blocks": blocks[::2],
        "all but last": [model.head, *blocks[:-1]],
        "all but tokens": [model.head, model.norm, *blocks],
        "norms": [block.norm for block in blocks],
        "tiles": [layer.weight for block in blocks for layer in (block.up, block.down)],
        "all but tiles": [one for b in blocks for one in (b.norm, b.scale, b.up.bias, b.down.bias)],
        "scales": [block.scale for block in blocks],
    }
    for one in frozen[what]:
        one.requires_grad_(False)


def build(frozen: str, recompute: str, tied: bool, shared: bool) -> Net:
    torch.manual_seed(3)
    model = Net(recompute)
    if tied:
        model.head.weight = model.tokens.weight
    if shared:
        model.blocks[2].up = model.blocks[1].up  # one module in two blocks
    freeze(model, frozen)
    return model


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + rank
    return torch.randint(ROWS, (2, 3), generator=torch.Generator().manual_seed(seed))


@functools.cache
def plain(frozen: str, recompute: str, tied: bool, shared: bool) -> dict[str, torch.Tensor]:
    """Trains in one process with the batches of all ranks."""
    model, world = build(frozen, recompute, tied, shared), dist.get_world_size()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATE):
            for rank in range(world):
                (model(tokens(step, micro, rank)) / world / ACCUMULATE).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def trains(config: dict[str, Any], *of_model: Any) -> float:
    """On a rank: the largest deviation from plain torch."""
    import penstock  # noqa: PLC0415

    settings = {"optimizer": {"type": "SGD", "lr": 0.1}, "batch": {"accumulate": ACCUMULATE}}
    engine = penstock.initialize(
        build(*of_model), settings | {"comm": {"timeout_s": 20}, "prefetch_bytes": 0} | config
    )
    for step in range(STEPS):
        for micro in range(ACCUMULATE):
            engine.backward(engine(tokens(step, micro, dist.get_rank())))
        engine.step()
    ours = engine.state_dict(rank0_only=False)
    engine.close()
    theirs = plain(*of_model)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


# strategy, world, other settings; frozen, recomputation by the model, tied, shared
CASES = [
    ("zero3", 2, {}, "even blocks", "", False, False),
    ("zero3", 1, {}, "even blocks", "", True, False),
    ("zero3", 2, {}, "all but last", "", False, False),
    ("zero3", 2, LAYERS, "all but tokens", "", False, False),
    ("zero3", 2, {}, "norms", "", True, False),
    ("zero3", 2, {}, "tiles", "", False, False),
    ("zero3", 2, {}, "all but tiles", "", False, False),
    ("zero3", 2, {}, "scales", "", False, False),
    ("zero3", 2, LAYERS, "norms", "", False, False),
    ("zero3", 2, HELD, "even blocks", "", False, False),
    ("zero3", 2, HELD | LAYERS, "all but last", "", True, False),
    ("zero3", 2, UNIT, "even blocks", "", False, False),
    ("zero3", 2, UNIT | LAYERS, "scales", "", False, False),
    ("zero3", 2, {}, "even blocks", "nonreentrant", False, False),
    ("zero3", 2, {}, "all but last", "reentrant", False, False),
    ("zero3", 2, {}, "all but tiles", "reentrant", False, False),
    ("zero3", 2, {}, "even blocks", "pairs", False, False),
    ("zero3", 1, HELD, "norms", "nonreentrant", False, False),
    ("zero3", 2, {}, "even blocks", "", False, True),
    ("zero3", 2, {}, "norms", "", False, True),
    ("hpz", 2, {}, "even blocks", "", False, False),
    ("hpz", 2, {"mesh": {"node": 2}}, "all but tokens", "", False, False),
    ("hpz", 1, LAYERS, "scales", "nonreentrant", False, False),
    ("mics", 2, {}, "norms", "reentrant", False, False),
    ("zero2", 2, {}, "even blocks", "", True, False),
    ("zero2", 1, UNIT, "all but last", "", False, False),
]


def name_of(case: Any) -> str:
    strategy, world, others, frozen, recompute, tied, shared = case
    flags = [*others, frozen, recompute, "tied" if tied else "", "shared" if shared else ""]
    return "-".join(
        [strategy, f"world{world}", *(flag.replace(" ", "_") for flag in flags if flag)]
    )


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_frozen_parameters_beside_tiles_train_like_torch(case, pools):
    strategy, world, others, *of_model = case
    for worst in pools(world).run(trains, {"strategy": strategy} | TILES | others, *of_model):
        assert worst <= 1e-5
