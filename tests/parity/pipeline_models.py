"""Models for pipelines, and what plain torch makes of their batches."""

from __future__ import annotations

from typing import Any

import torch
from models import fill
from torch import nn

WIDTH, VOCAB = 16, 41


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + (hidden if scale is None else hidden * scale)


class Chain(nn.Module):
    """Tokens, blocks, a head, and the loss: nothing was made for pipelines.

    `tied`: the head's weight is the embedding's. `own`: a parameter of the model itself that is
    added before the head. `skip`: every block is given what the embedding made, too.
    """

    def __init__(
        self, layers: int = 4, tied: bool = False, own: bool = False, skip: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.shift = nn.Parameter(torch.zeros(WIDTH)) if own else None
        self.skip = skip

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x, scale = first, first.sigmoid()
        for block in self.blocks:
            x = block(x, scale) if self.skip else block(x)
        x = self.norm(x)
        if self.shift is not None:
            x = x + self.shift
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(**options: Any) -> Chain:
    return fill(Chain(**options), 3)


def batch(step: int, rank: int, micro: int, rows: int = 2, length: int = 6) -> Any:
    """The samples of a data rank for one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCAB, (rows * micro, length), generator=generator)
    labels = torch.randint(0, VOCAB, (rows * micro, length), generator=generator)
    return {"ids": ids, "labels": labels}


def plain(model: nn.Module, steps: int, data: int, micro: int, **options: Any) -> dict[str, Any]:
    """Losses, norms, first gradients and weights of one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for rank in range(data):
            for part in parts(batch(step, rank, micro), micro):
                loss = model(**part) / (micro * data)
                loss.backward()
                losses.append(float(loss.detach()))
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        told["norms"].append(float(torch.stack([one.norm() for one in grads]).norm()))
        if step == 0:
            told["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        if options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
        told["losses"].append(sum(losses))
    told["weights"] = {name: one.detach().clone() for name, one in model.named_parameters()}
    return told


def parts(whole: dict[str, torch.Tensor], micro: int) -> list[dict[str, torch.Tensor]]:
    size = next(iter(whole.values())).shape[0] // micro
    return [
        {name: one[i * size : (i + 1) * size] for name, one in whole.items()} for i in range(micro)
    ]
