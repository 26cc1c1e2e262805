"""The models that the rows train, and their data."""

from __future__ import annotations

import models
import torch
from torch import nn

FEATURES, WIDTH = 6, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Features in, one number a sample out. It computes in its weights' precision."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.Sequential(*(Mlp() for _ in range(blocks)))

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.enter(features.to(self.enter.weight.dtype)))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.leave(self.trunk(features)).squeeze(-1)


def build(kind: type[nn.Module] = Net, *args: object) -> nn.Module:
    """The same weights each time."""
    return models.fill(kind(*args))


def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and targets."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x.sin().sum(-1)


def ramp(like: torch.Tensor) -> torch.Tensor:
    """Values of that shape and dtype, not all alike: bf16 would train on rounding errors alone."""
    values = torch.linspace(-0.25, 0.25, like.numel(), dtype=torch.float)
    return values.reshape(like.shape).to(like.dtype)
