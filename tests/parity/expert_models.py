"""A chain whose blocks have experts, and the exchange by which expert ranks share them.

The exchange is written for tests alone: every expert rank gets the tokens of all, computes its own
experts for them, and the sums go back.
"""

from __future__ import annotations

from typing import Any

import pipeline_models
import torch
import torch.distributed as dist
from models import fill
from torch import nn

WIDTH, EXPERTS, CHOSEN = pipeline_models.WIDTH, 4, 2
RULES = {"*.experts": "expert"}

_group: Any = None  # this rank's expert ranks
_groups: dict[tuple[int, ...], Any] = {}  # by members


def meet(groups: list[list[int]]) -> None:
    """On every rank: the groups of expert ranks, in which whole experts are not kept."""
    global _group
    for members in groups:
        if tuple(members) not in _groups:
            _groups[tuple(members)] = dist.new_group(members, backend="gloo")
        if dist.get_rank() in members:
            _group = _groups[tuple(members)]


class _Gather(torch.autograd.Function):
    """[n, w] of this rank -> [n * ranks, w] of all; the gradients of all are added up."""

    @staticmethod
    def forward(_: Any, own: torch.Tensor) -> torch.Tensor:
        parts = [
            torch.empty(own.shape, dtype=own.dtype) for _ in range(dist.get_world_size(_group))
        ]
        dist.all_gather(parts, own.detach().cpu().contiguous(), group=_group)
        return torch.cat(parts).to(own.device)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:
        return _own_sum(grad)


class _Sum(torch.autograd.Function):
    """[n * ranks, w], an addend of each rank -> [n, w], the sum of this rank's tokens."""

    @staticmethod
    def forward(_: Any, addends: torch.Tensor) -> torch.Tensor:
        return _own_sum(addends)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:
        return _Gather.forward(None, grad)


def _own_sum(addends: torch.Tensor) -> torch.Tensor:
    total = addends.detach().cpu().contiguous().clone()
    dist.all_reduce(total, group=_group)
    own = dist.get_rank(_group)
    return total.chunk(dist.get_world_size(_group))[own].clone().to(addends.device)


class Experts(nn.Module):
    """One row of each parameter per expert, as transformers has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, width, 2 * width))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, 2 * width))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 2 * width, width))

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """[tokens, width], [tokens, experts] -> [tokens, width]."""
        held = self.up.shape[0]
        if held == EXPERTS:
            return self.compute(x, shares)
        first = dist.get_rank(_group) * held
        x, shares = _Gather.apply(x), _Gather.apply(shares)
        return _Sum.apply(self.compute(x, shares[:, first : first + held]))

    def compute(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(torch.einsum("tw,nwf->ntf", x, self.up) + self.bias[:, None])
        return torch.einsum("ntf,nfw,tn->tw", hidden, self.down, shares)


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, EXPERTS), Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        shares = self.router(flat).softmax(-1)
        least = shares.topk(CHOSEN, -1).values[:, -1:]
        shares = torch.where(shares >= least, shares, 0.0)
        return self.experts(flat, shares / shares.sum(-1, keepdim=True)).view_as(x)


class Block(pipeline_models.Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mixture, self.skips = Mixture(width), False

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.skips:
            return x
        x = super().forward(x, scale)
        return x + self.mixture(x)


def build() -> nn.Module:
    model = pipeline_models.Chain(layers=2)
    model.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
    return fill(model, 3)
