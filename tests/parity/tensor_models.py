"""A model with every way in which a layer is cut over tensor ranks, and its rules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import SEQ, run_block
from torch import nn

VOCAB, WIDTH, HEADS, KEYS, INNER = 67, 48, 4, 2, 40  # a vocabulary that no number of ranks divides
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    """Fewer keys and values than queries, with norms of each head's."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, KEYS * SIZE) for _ in range(2))
        self.query_norm, self.key_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        query = self.query(x).view(batch, seq, self.heads, SIZE)
        key, value = (part(x).view(batch, seq, -1, SIZE) for part in (self.key, self.value))
        query, key = self.query_norm(query), self.key_norm(key)
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query, key, value)), is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = Attention()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.packed, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.wide, self.wide_norm = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER)
        self.narrow = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        one, two, three = self.qkv(self.norms[1](x)).chunk(3, dim=-1)
        x = x + self.proj(one * two.tanh() + three)
        gate, up = self.packed(x).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return x + self.narrow(self.wide_norm(self.wide(self.norms[2](x))))


class Parts(nn.Module):
    """A GPT whose embedding is its head."""

    def __init__(self, recompute: str = "off", tied: bool = True, twice: bool = False) -> None:
        super().__init__()
        self.recompute, self.twice = recompute, twice
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if twice:
            self.never = nn.Linear(4, 4)  # used
        if tied:
            self.head.weight = self.tokens.weight
        self.blocks[0].norms[0].requires_grad_(False)
        self.blocks[1].attention.query.requires_grad_(False)
        self.blocks[1].attention.query_norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = run_block(block, x, self.recompute)
        if self.twice:  # the gradients of its first use come late
            x = run_block(self.blocks[0], x, self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rules(tensor: int) -> dict[str, str]:
    """Of Parts, on so many tensor ranks."""
    keys = "column" if tensor <= KEYS else f"shared:{KEYS}"
    return {
        "tokens": "vocab",
        "head": "vocab",
        "places": "column_gather",
        "*.query": "column",
        "*.key": keys,
        "*.value": keys,
        "*.query_norm": "partial",
        "*.key_norm.weight": "partial",
        "*.attention.heads": "divide",
        "*.out": "row",
        "*.qkv": "column:3",
        "*.proj": "row",
        "*.packed": "column:2",
        "*.down": "row",
        "*.wide": "column_gather",
        "*.narrow": "row_cut",
        "*.norm*": "whole",
    }
