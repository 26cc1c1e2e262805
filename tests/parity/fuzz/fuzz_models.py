"""Random small models: stacks of blocks that hold what real ones trip over.

A model takes `samples` x SEQ inputs and returns two heads' outputs, each samples x OUTPUTS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from models import run_block
from torch import nn

SEQ, FEATURES, OUTPUTS = 5, 3, 11


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Conv(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Recur(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x)[0]


class Attend(nn.Module):
    """Without biases: that of the keys has a gradient of zero but for rounding. Written out, as the
    fused operator has no second derivative."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(1, 2) / x.shape[-1] ** 0.5, -1)
        return x + self.proj(weights @ value)


class Odd(nn.Module):
    """Parameters of one element and of no dimension, and one that is never used."""

    def __init__(self, width: int):
        super().__init__()
        self.never = nn.Parameter(torch.zeros(3))
        self.mix = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.sin(self.mix(x) + self.shift)


class Nest(nn.Module):
    """Blocks within a block, one of them called twice."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.ModuleList([Odd(width), Mlp(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.inner[0], self.inner[1], self.inner[0]):
            x = block(x)
        return self.gain * x


KINDS = {kind.__name__: kind for kind in (Mlp, Conv, Recur, Attend, Odd, Nest)}


@dataclass(frozen=True)
class Shape:
    """What a model is made of; blocks are meant by their index."""

    width: int
    tokens: bool  # enters by an embedding, else by a linear layer
    blocks: tuple[str, ...]
    order: tuple[int, ...]  # of the calls: a block may be called twice, or never
    frozen: tuple[int, ...]  # for good
    tied: tuple[int, ...]  # two blocks of a kind that share their first parameter, or none
    tied_head: bool  # with the embedding
    outside: bool  # the root reads a parameter of block 0
    recompute: str  # activation checkpointing


class Model(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width = shape.width
        self.enter = nn.Embedding(OUTPUTS, width) if shape.tokens else nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(KINDS[kind](width) for kind in shape.blocks)
        self.head, self.other = nn.Linear(width, OUTPUTS), nn.Linear(width, OUTPUTS)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, width))
        if shape.tied_head:
            self.head.weight = self.enter.weight
        if shape.tied:
            kept, given = (self.blocks[index] for index in shape.tied)
            name, parameter = next(kept.named_parameters())
            owner, _, last = name.rpartition(".")
            setattr(given.get_submodule(owner), last, parameter)
        for index in shape.frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.gain.dtype == torch.float32, f"a buffer was cast to {self.gain.dtype}"
        x = self.enter(x if self.shape.tokens else x.to(self.enter.weight.dtype))
        recompute = self.shape.recompute if torch.is_grad_enabled() else "off"
        for index in self.shape.order[:depth]:
            x = run_block(self.blocks[index], x, recompute)
        x = (x.mean(1).float() * self.gain).to(x.dtype)
        if self.shape.outside:
            x = x + next(self.blocks[0].parameters()).mean()
        return self.head(x).float(), self.other(x).float()


def build(shape: Shape, seed: int) -> Model:
    """The same weights for the same seed; none keeps a value (0 or 1) that would hide an error."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Model(shape)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def batch(shape: Shape, samples: int, key: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for the same key."""
    generator = torch.Generator().manual_seed(hash(key))
    if shape.tokens:
        x = torch.randint(OUTPUTS, (samples, SEQ), generator=generator)
    else:
        x = torch.randn(samples, SEQ, FEATURES, generator=generator)
    return x, torch.randn(samples, OUTPUTS, generator=generator)
