"""Models of which several ranks of DeepSpeed compute one copy, whole and in parts; their data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BEFORE, AFTER, MICRO = 3, 3, 2
WORDS, PADDED, SIZE = 11, 12, 6
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# By folder: ranks of data, of the pipeline and of the model, the stage of ZeRO; "info" is kept.
CASES: dict[str, dict[str, Any]] = {
    "tensor2-zero1-fp32": {"data": 2, "pipe": 1, "model": 2, "stage": 1, "info": False},
    "tensor2-zero2-bf16": {"data": 2, "pipe": 1, "model": 2, "stage": 2, "info": True},
    "pipe2-zero1-fp32": {"data": 1, "pipe": 2, "model": 1, "stage": 1, "info": False},
    "pipe2-data2-zero1-bf16": {"data": 2, "pipe": 2, "model": 1, "stage": 1, "info": False},
    "pipe2-tensor2-zero1-fp32": {"data": 1, "pipe": 2, "model": 2, "stage": 1, "info": False},
}
# As Megatron-DeepSpeed writes it for its model.
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": WORDS,
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\..*", r"head\..*", r"block\.down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"block\.down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"block\.gate_up\..*"],
}
RULES: dict[str, Any] = {"*gate_up": "column:2", "*down": "row", "*embed.weight": 0}


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, WORDS, (4, 8), generator=generator)


class Sum(torch.autograd.Function):
    """The sum over ranks of the model, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any, backward: bool) -> torch.Tensor:
        ctx.group, ctx.backward_too = group, backward
        return value.clone() if backward else summed(value, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return summed(grad, ctx.group) if ctx.backward_too else grad, None, None


def summed(value: torch.Tensor, group: Any) -> torch.Tensor:
    value = value.clone().contiguous()
    dist.all_reduce(value, group=group)
    return value


class Block(nn.Module):
    """[gate|up] and what goes down again: the first cut by outputs, the second by inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(SIZE, 16)
        self.down = nn.Linear(8, SIZE)
        self.group: Any = None

    def cut(self, rank: int, ranks: int, group: Any) -> Block:
        self.group = group
        for linear, dim in ((self.gate_up, 0), (self.down, 1)):
            for name, param in list(linear.named_parameters()):
                if linear is self.gate_up or name == "weight":
                    made = nn.Parameter(part_of(param.data, dim, 2 - dim, rank, ranks))
                    made.model_parallel = True
                    setattr(linear, name, made)
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given = hidden if self.group is None else Sum.apply(hidden, self.group, True)
        gate, up = self.gate_up(given).chunk(2, -1)
        made = F.linear(F.gelu(gate) * up, self.down.weight)
        if self.group is not None:
            made = Sum.apply(made, self.group, False)
        return hidden + made + self.down.bias


def part_of(value: torch.Tensor, dim: int, parts: int, rank: int, ranks: int) -> torch.Tensor:
    cut = [one.chunk(ranks, dim)[rank] for one in value.chunk(parts, dim)]
    return torch.cat(cut, dim).clone()


class Model(nn.Module):
    """With an embedding whose rows are cut, and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.block = Block()
        self.head = nn.Linear(SIZE, WORDS)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0, 2.0, 1.0, 1.0]))
        self.begin, self.group = 0, None

    def cut(self, rank: int, ranks: int, group: Any) -> Model:
        rows = PADDED // ranks
        padded = torch.cat([self.embed.weight.data, torch.full((PADDED - WORDS, SIZE), 7.0)])
        self.embed = nn.Embedding(rows, SIZE)
        self.embed.weight.data = padded[rank * rows : (rank + 1) * rows].clone()
        self.embed.weight.model_parallel = True
        self.begin, self.group = rank * rows, group
        self.block.cut(rank, ranks, group)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = tokens[:, :-1] - self.begin
        inside = (at >= 0) & (at < self.embed.num_embeddings)
        hidden = self.embed(at.where(inside, 0)) * inside.unsqueeze(-1)
        if self.group is not None:
            hidden = Sum.apply(hidden, self.group, False)
        hidden = self.block(self.norm(hidden * self.scale.to(hidden.dtype)))
        return loss_of(self.head(hidden), tokens[:, 1:])


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Scaled(nn.Module):
    """A layer with a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0, 2.0, 1.0, 1.0]))
        self.shift = nn.Parameter(torch.arange(6.0) / 8, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden * self.scale.to(hidden.dtype)) + self.shift


def head(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, module.weight)


def layers(spec: Any, tied: Any, block: Any = Block) -> list[Any]:
    """Layers of a pipeline, of either library's LayerSpec and TiedLayerSpec."""
    return [
        tied("tokens", nn.Embedding, WORDS, SIZE),
        spec(block),
        torch.tanh,
        spec(Scaled),
        spec(block),
        tied("tokens", nn.Embedding, WORDS, SIZE, forward_fn=head),
    ]
