"""Modules that keep state, and modules around and beside the engine's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import Group, either, refused

rows = Group("Modules")
ONE = (1,)
FP32 = ("fp32",)


class WithBuffers(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean * 0.9 + 0.1
        return super().forward(features + self.mean)


@rows("buffers that the forward edits and replaces")
def buffers(t: Any) -> None:
    t.start(nets.build(WithBuffers))
    t.train(3)


@rows("buffers that are edited between steps")
def buffers_edited(t: Any) -> None:
    t.start(nets.build(WithBuffers))
    t.train(1)
    t.model.mean.fill_(0.5)
    t.train(1, start=1)
    t.model.mean = torch.full((6,), 0.25)
    t.train(1, start=2)


class Normed(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.norm(features.to(self.norm.weight.dtype))
        return super().forward(features)


def normed() -> nn.Module:
    return nets.build(Normed)


@rows("`BatchNorm` in training, then in evaluation", world=ONE, precision=FP32)
def batch_norm(t: Any) -> None:
    t.start(normed())
    t.train(3)
    t.engine.eval()
    with torch.no_grad():
        t.loss(7)


@rows("`BatchNorm` kept in evaluation while the rest trains", precision=FP32)
def batch_norm_frozen(t: Any) -> None:
    t.start(normed())
    t.engine.train()
    t.model.norm.eval()
    t.train(3)


@rows("`update_bn` of `torch.optim.swa_utils`", world=ONE, precision=FP32)
def update_bn(t: Any) -> dict[str, Any]:
    t.start(normed())
    t.train(2)
    torch.optim.swa_utils.update_bn([t.batch(step)[0] for step in range(3)], t.model)
    return {"mean": t.model.norm.running_mean}


@rows("`model.norm.momentum = ...` and `reset_running_stats()`", world=ONE, precision=FP32)
def batch_norm_edited(t: Any) -> None:
    t.start(normed())
    t.train(1)
    t.model.norm.momentum = 0.5
    t.model.norm.reset_running_stats()
    t.train(2, start=1)


class Drops(nets.Net):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(features, 0.3, self.training))


@rows("dropout with a seed", world=ONE)
def dropout(t: Any) -> None:
    t.start(nets.build(Drops))
    torch.manual_seed(9)
    t.train(3)
    t.engine.eval()
    with torch.no_grad():
        t.loss(7)


@rows("`eval()` and `train()` through the engine and through the model")
def modes(t: Any) -> dict[str, Any]:
    t.start(nets.build(Drops))
    seen = []
    for target in (t.engine, t.model):
        target.eval()
        seen.append([t.model.training, t.model.blocks[0].training])
        with torch.no_grad():
            t.loss(3)
        target.train()
        seen.append([t.model.training, t.model.blocks[0].training])
    t.engine.eval()
    t.train(2)
    return {"seen": seen}


class Keyed(nn.Module):
    """Attention, a GRU, an embedding bag, a convolution and a `ModuleDict`."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Embedding(12, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(12, 8, mode="sum")
        self.parts = nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(8, 2, batch_first=True),
                "gru": nn.GRU(8, 8, batch_first=True),
                "conv": nn.Conv1d(8, 8, 3, padding=1),
                "norm": nn.GroupNorm(2, 8),
            }
        )
        self.leave = nn.Linear(8, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        tokens = (features.abs() * 5).long() % 12
        x = self.lift(tokens)
        x = x + self.parts["attention"](x, x, x, need_weights=False)[0]
        x = x + self.parts["gru"](x)[0]
        x = x + self.parts["norm"](self.parts["conv"](x.transpose(1, 2))).transpose(1, 2)
        return self.leave(x.mean(1) + self.bag(tokens)).squeeze(-1)


@rows("attention, a GRU, an embedding bag, a convolution, a `ModuleDict`")
def keyed(t: Any) -> None:
    t.start(nets.build(Keyed))
    t.train(3)


class Packs(nn.Module):
    """A sorted, packed batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.leave = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([6, 4, 3, 2][: len(features)])
        packed = nn.utils.rnn.pack_padded_sequence(
            features[..., None].to(self.leave.weight.dtype), lengths, batch_first=True
        )
        _, (hidden, _) = self.lstm(packed)
        return self.leave(hidden[0]).squeeze(-1)


@rows("`pack_padded_sequence` into an LSTM", precision=FP32, world=ONE)
def packed(t: Any) -> None:
    t.start(nets.build(Packs))
    t.train(3)


@rows("`rnn.flatten_parameters()` after `initialize`", sharded=either(), world=ONE)
def flattened(t: Any) -> None:
    t.start(nets.build(Packs))
    t.train(1)
    t.model.lstm.flatten_parameters()
    t.train(2, start=1)


class Renorms(nn.Module):
    """Its embedding edits its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Embedding(12, 8, max_norm=0.4)
        self.blocks = nn.Sequential(*(nets.Mlp() for _ in range(2)))
        self.leave = nn.Linear(8, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        tokens = (features.abs() * 5).long() % 12
        return self.leave(self.blocks(self.lift(tokens).mean(1))).squeeze(-1)


@rows("an embedding with `max_norm`", sharded=refused("lift.weight"), alone=either(), world=ONE)
def renorms(t: Any) -> None:
    t.start(nets.build(Renorms))
    t.train(3)


@rows("`nn.DataParallel` or another wrapper around the engine's model", either())
def data_parallel(t: Any) -> None:
    t.start()
    wrapped = nn.DataParallel(t.model)
    for step in t.steps(2):
        t.engine.backward(t.loss(step, wrapped))
        t.engine.step()


@rows("the model inside another module, which calls it")
def inside_another(t: Any) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    t.start()
    outer = Outer(t.model)
    for step in t.steps(3):
        t.engine.backward(t.loss(step, outer))
        t.engine.step()


@rows("a module of your own beside the engine, with an optimizer of its own")
def beside(t: Any) -> dict[str, Any]:
    t.start()
    torch.manual_seed(3)
    head = nn.Linear(1, 1)
    own = torch.optim.SGD(head.parameters(), lr=0.0)
    for step in t.steps(2):
        x, y = t.batch(step)
        output = head(t.engine(x).float()[:, None]).squeeze(-1)
        t.engine.backward(t.note(F.mse_loss(output, y)))
        own.step()
        t.engine.step()
    return {"grad": head.weight.grad is not None}


class Image(nets.Net):
    """A convolution of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (1, 3))

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        image = torch.stack([features, features.flip(-1)], 1)[:, :, None]
        image = image.to(self.conv.weight.dtype, memory_format=torch.channels_last)
        return super().trunk(features) + self.conv(image).mean((1, 2, 3))[:, None]


@rows("`model.to(memory_format=torch.channels_last)` before `initialize`")
def channels_last(t: Any) -> None:
    t.start(nets.build(Image).to(memory_format=torch.channels_last))
    t.train(3)


@rows("`model.to(memory_format=torch.channels_last)` after `initialize`", sharded=either())
def channels_last_later(t: Any) -> None:
    t.start(nets.build(Image))
    t.train(1)
    t.model.to(memory_format=torch.channels_last)
    t.train(2, start=1)


def wrapped(t: Any, wrap: Any) -> None:
    """Plain torch, in one process, has no group of ranks and trains the model itself."""
    model = nets.build()
    t.start(model if t.plain else wrap(model))
    t.train(1)


@rows("a model in `DistributedDataParallel`", refused("DistributedDataParallel", ".module"))
def in_ddp(t: Any) -> None:
    wrapped(t, nn.parallel.DistributedDataParallel)


@rows("a block in `DistributedDataParallel`", refused("blocks.0", "DistributedDataParallel"))
def block_in_ddp(t: Any) -> None:
    def wrap(model: Any) -> nn.Module:
        model.blocks[0] = nn.parallel.DistributedDataParallel(model.blocks[0])
        return model

    wrapped(t, wrap)


@rows("a model in `FullyShardedDataParallel`", refused("FullyShardedDataParallel"))
def in_fsdp(t: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - takes long

    wrapped(t, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")))


@rows("a model after `fully_shard`", refused("fully_shard"))
def after_fully_shard(t: Any) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - takes long

    def wrap(model: Any) -> nn.Module:
        fully_shard(model)
        return model

    wrapped(t, wrap)


@rows("the `module` of a `DistributedDataParallel` that stays alive")
def of_ddp(t: Any) -> None:
    kept = []

    def wrap(model: Any) -> nn.Module:
        kept.append(nn.parallel.DistributedDataParallel(model))
        return kept[0].module

    wrapped(t, wrap)
