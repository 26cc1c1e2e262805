"""A small GPT and its training, on any device, for the tests of the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import moved

VOCABULARY, LENGTH, BATCH = 61, 16, 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))


class GPT(nn.Module):
    """With learned positions and a head tied to the embedding."""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant: bool | None = None  # None: no activation checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@dataclass
class Training:
    """What differs between the cases."""

    dropout: float = 0.0
    optimizer: dict[str, Any] = field(default_factory=dict)
    reentrant: bool | None = None
    context: Callable[[], Any] | None = None  # around forward
    wrap: Callable[[nn.Module], nn.Module] | None = None
    rank: int = 0


@dataclass
class Trained:
    losses: list[float]
    parameters: list[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Trained)
            and self.losses == other.losses
            and len(self.parameters) == len(other.parameters)
            and all(map(torch.equal, self.parameters, other.parameters))
        )


def build(device: str, dropout: float = 0.0) -> GPT:
    """The same weights on every device. Tied weights stay tied only by swapping (README.md)."""
    torch.manual_seed(0)
    return moved(GPT(dropout=dropout), device)


def train(device: str, case: Training, steps: int = 3) -> Trained:
    """Some steps of AdamW with clipping; losses and parameters are read at the end only."""
    model: nn.Module = build(device, case.dropout)
    model.reentrant = case.reentrant
    if case.wrap:
        model = case.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **case.optimizer)
    data = torch.Generator().manual_seed(1 + case.rank)
    torch.manual_seed(2 + case.rank)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=data).to(device)
        context = case.context() if case.context else torch.enable_grad()
        with context:
            scores = model(tokens)
            loss = F.cross_entropy(scores.flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Trained([loss.item() for loss in losses], [whole(p) for p in model.parameters()])


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Its values on the CPU, of a sharded parameter all of them."""
    values = parameter.detach()
    if hasattr(values, "full_tensor"):
        values = values.full_tensor()
    return values.cpu()
