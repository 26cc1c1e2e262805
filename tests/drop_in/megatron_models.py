"""Layers in the style of Megatron-LM: they cut their own parameters over the tensor ranks of an
mpu. Without tensor ranks the same layers compute the whole model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, HIDDEN, ROWS, LENGTH = 24, 8, 16, 2, 6
SEED = 11


class Mpu:
    """Groups of tensor ranks (neighbours) and of data ranks, as a script makes them."""

    def __init__(self, tensor: int, apart: bool = False) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        near = [[*range(i, i + tensor)] for i in range(0, world, tensor)]
        across = [[*range(i, world, tensor)] for i in range(tensor)]
        self._tensor, self._data = (
            next(group for ranks, group in [(r, dist.new_group(r)) for r in lists] if rank in ranks)
            for lists in ((across, near) if apart else (near, across))
        )

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)


class Streams:
    """Random numbers of layers that are cut, in one process: a generator for each tensor rank."""

    def __init__(self, seed: int, count: int) -> None:
        kept = torch.get_rng_state()
        self._states = []
        for rank in range(count):
            torch.manual_seed(seed + 2718 + rank)
            self._states.append(torch.get_rng_state())
        torch.set_rng_state(kept)

    def dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        kept, made = torch.get_rng_state(), []
        for index, part in enumerate(x.chunk(len(self._states), -1)):
            torch.set_rng_state(self._states[index])
            made.append(functional.dropout(part, p))
            self._states[index] = torch.get_rng_state()
        torch.set_rng_state(kept)
        return torch.cat(made, -1)


class Tracked:
    """The same on a tensor rank, with DeepSpeed's tracker."""

    def dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        from deepspeed.runtime.activation_checkpointing import checkpointing  # noqa: PLC0415

        with checkpointing.get_cuda_rng_tracker().fork():
            return functional.dropout(x, p)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        made = x.contiguous().clone()
        dist.all_reduce(made, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(x) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.size, -1)[ctx.rank], None


class Place:
    """This rank's place among tensor ranks, and the exchanges. Without a group: one process."""

    def __init__(self, group: Any = None, streams: Any = None) -> None:
        self.group, self.streams = group, streams
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Copy.apply(x, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Sum.apply(x, self.group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Gather.apply(x, self.group)

    def parameter(
        self, shape: tuple[int, ...], dim: int = 0, stride: int = 1, mark: str = "model_parallel"
    ) -> nn.Parameter:
        """This rank's part of random values of the whole shape, with the marks of Megatron-LM."""
        whole = torch.randn(shape) * 0.3
        blocks = whole.unflatten(dim, (stride, self.size, -1))
        made = nn.Parameter(blocks.select(dim + 1, self.rank).flatten(dim, dim + 1).clone())
        if mark:
            setattr(made, mark, True)
            made.partition_dim, made.partition_stride = dim, stride
        return made

    def __deepcopy__(self, memo: Any) -> Place:
        return self


class VocabEmbedding(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place, self.weight = place, place.parameter((VOCAB, WIDTH))

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.place.rank * len(self.weight)
        outside = (ids < first) | (ids >= first + len(self.weight))
        rows = functional.embedding((ids - first).masked_fill(outside, 0), self.weight)
        return self.place.sum(rows.masked_fill(outside[..., None], 0.0))


class Block(nn.Module):
    """A norm, a fused column layer, dropout of its part, a row layer, dropout of the whole."""

    def __init__(self, place: Place, whole_dropout: float = 0.2, mark: str = "model_parallel"):
        super().__init__()
        self.place, self._dropout = place, whole_dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.up = place.parameter((2 * HIDDEN, WIDTH), 0, 2, mark)
        self.up_bias = place.parameter((2 * HIDDEN,), 0, 2, mark)
        self.down = place.parameter((WIDTH, HIDDEN), 1, 1, "tensor_model_parallel")
        self.down_bias = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(
            self.place.copy(self.norm(x)), self.up, self.up_bias
        ).chunk(2, -1)  # fmt: skip
        inner = torch.sigmoid(gate) * up
        if self.training:
            inner = self.place.streams.dropout(inner, 0.25)
        made = self.place.sum(functional.linear(inner, self.down)) + self.down_bias
        return x + functional.dropout(made, self._dropout, self.training)


def logits_of(embedding: VocabEmbedding, x: torch.Tensor) -> torch.Tensor:
    place = embedding.place
    return place.gather(functional.linear(place.copy(x), embedding.word_embeddings_weight))


class Head(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place, self.weight = place, place.parameter((VOCAB, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.place.gather(functional.linear(self.place.copy(x), self.weight))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Net(nn.Module):
    """A model that is called as a whole: `checkpoint` recomputes each block."""

    def __init__(self, place: Place, checkpoint: Any = None, mark: str = "model_parallel") -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self.tokens = VocabEmbedding(place)
        self.blocks = nn.ModuleList(Block(place, mark=mark) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x) if self._checkpoint is None else self._checkpoint(block, x)
        return logits_of(self.tokens, self.norm(x))


def batch(step: int, data_rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + micro)
    ids = torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=generator)
    return ids[0], ids[1]


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "penstock": {"comm": {"timeout_s": 120}},
    } | changes
