"""One training step on a device: plain torch, FSDP2 and Penstock's tiers, for gpu_train.py.

`make(name, build, settings)` returns a trainer with `step(inputs, targets)`, a whole step (forward,
backward, clipping, AdamW) that returns the loss, and `finish()`, after which nothing that a step
began is under way. `build()` returns a model with fp32 weights on the device. All trainers keep
fp32 master weights and moments, and compute in bf16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import penstock

HOST, DISK = "host", "disk"
ALL = ("optimizer", "params", "gradients")
# Ours, by name: the strategy and the tiers. Alone on a device "ddp" has everything whole on it;
# what rests elsewhere does so with "zero3".
TIERS: dict[str, dict[str, Any]] = {
    "ours device": {},
    "ours host optimizer": {"optimizer": HOST, "late_update": True},
    "ours all on host": {name: HOST for name in ALL} | {"late_update": True},
    "ours all on disk": {name: DISK for name in ALL} | {"late_update": True},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all trainers share."""

    device: torch.device
    block: type[nn.Module]  # what FSDP2 and Penstock take as a unit
    recompute: bool  # activation checkpointing of every block
    clip: float = 1.0
    lr: float = 1e-4
    path: str = ""  # of swap files

    def adam(self, params: list[torch.Tensor]) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )


Build = Callable[[], nn.Module]


def recompute_blocks(model: nn.Module, settings: Settings) -> None:
    for module in model.modules():
        if settings.recompute and isinstance(module, settings.block):
            module.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, module.forward, use_reentrant=False
            )


class Torch:
    """fp32 weights, bf16 by autocast, fused AdamW: the usual loop."""

    def __init__(self, build: Build, settings: Settings):
        self._model, self._settings = build(), settings
        recompute_blocks(self._model, settings)
        self._prepare()

    def _prepare(self) -> None:
        self._params = list(self._model.parameters())
        self._adam = self._settings.adam(self._params)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._settings.device.type, torch.bfloat16):
            return self._model(inputs, targets)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._loss(inputs, targets)
        loss.backward()
        if self._settings.clip:
            nn.utils.clip_grad_norm_(self._params, self._settings.clip)
        self._adam.step()
        self._adam.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        pass


class TorchMasters(Torch):
    """A bf16 model, and fp32 masters that its gradients are cast to: the fastest plain loop."""

    def _prepare(self) -> None:
        self._masters = [param.detach().clone() for param in self._model.parameters()]
        self._adam = self._settings.adam(self._masters)
        self._model.bfloat16()
        self._params = list(self._model.parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._model(inputs, targets)
        loss.backward()
        for param, master in zip(self._params, self._masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        if self._settings.clip:
            nn.utils.clip_grad_norm_(self._masters, self._settings.clip)
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        return loss.detach()


class FSDP2(Torch):
    """fully_shard on every block and on the whole model, on one rank: bf16 parameters and
    reductions; `offload`: its state rests in pinned host memory, where torch's fused AdamW runs."""

    def __init__(self, build: Build, settings: Settings, offload: bool = False):
        self._offload = offload
        super().__init__(build, settings)

    def _prepare(self) -> None:
        bf16 = torch.bfloat16
        mesh = dist.init_device_mesh(self._settings.device.type, (1,))
        options: dict[str, Any] = {"mesh": mesh}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
        if self._offload:
            options["offload_policy"] = CPUOffloadPolicy()
        for module in list(self._model.modules()):
            if isinstance(module, self._settings.block):
                fully_shard(module, **options)
        fully_shard(self._model, **options)
        super()._prepare()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._model(inputs, targets)
        return loss


class Penstock:
    """The engine, with state where `tiers` says."""

    def __init__(self, build: Build, settings: Settings, tiers: dict[str, Any]):
        adam = {"type": "AdamW", "lr": settings.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}
        config: dict[str, Any] = {
            "strategy": "zero3" if tiers else "ddp",
            "precision": "bf16",
            "optimizer": adam,
            "clip": settings.clip,
            "units": {"modules": [settings.block.__name__]},
        }
        if tiers:
            path = {"path": settings.path} if settings.path and DISK in tiers.values() else {}
            config["offload"] = tiers | path
        if settings.recompute:
            config["activations"] = {"checkpoint": "unit"}
        self.engine = penstock.initialize(build(), config)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._last = (inputs[:1], targets[:1])
        loss: torch.Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def finish(self) -> None:
        """A forward needs every unit's new weights, so late updates are over when it is."""
        if self._last is not None:
            with torch.no_grad():
                self.engine(*self._last)


Trainer = Torch | Penstock
PEERS: dict[str, Callable[[Build, Settings], Trainer]] = {
    "torch autocast": Torch,
    "torch bf16": TorchMasters,
    "FSDP2": FSDP2,
    "FSDP2 host": functools.partial(FSDP2, offload=True),
}
# In this order they share processes, as far as memory allows.
NAMES = (
    "torch bf16",
    "ours device",
    "ours host optimizer",
    "ours all on host",
    "FSDP2",
    "torch autocast",
    "FSDP2 host",
    "ours all on disk",
)
NEED_DEVICE = {"FSDP2 host"}
# Bytes per parameter where state rests: on the device, in host memory, on disk. Of pinned memory
# torch's allocator takes up to the next power of two, here a third more.
BYTES = {
    "torch bf16": (14.0, 0.0, 0.0),
    "torch autocast": (12.0, 0.0, 0.0),
    "FSDP2": (12.0, 0.0, 0.0),
    "FSDP2 host": (0.5, 17.0, 0.0),
    "ours device": (14.0, 0.0, 0.0),
    "ours host optimizer": (2.5, 14.7, 0.0),
    "ours all on host": (0.5, 17.4, 0.0),
    "ours all on disk": (0.5, 1.0, 16.0),
}
# On the device, of the one whose turn it is: gradients, and what is cast; while one is made, its
# model in fp32.
WORKING_BYTES = 6.0


def make(name: str, build: Build, settings: Settings) -> Trainer:
    """Names: NAMES."""
    if name in TIERS:
        return Penstock(build, settings, TIERS[name])
    return PEERS[name](build, settings)
