"""One training step on a device: plain torch, DDP, FSDP2, DeepSpeed and Penstock's strategies and
tiers, for the benchmarks gpu_*.py.

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

import peers
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock

HOST, DISK = "host", "disk"
ALL = ("optimizer", "params", "gradients")
# Ours, by name: the strategy and the tiers. Alone on a device "ddp" has everything whole on it;
# what rests elsewhere does so with "zero3".
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours device": ("ddp", {}),
    "ours host optimizer": ("zero3", {"optimizer": HOST, "late_update": True}),
    "ours all on host": ("zero3", {name: HOST for name in ALL} | {"late_update": True}),
    "ours all on disk": ("zero3", {name: DISK for name in ALL} | {"late_update": True}),
    **{f"ours {name}": (name, {}) for name in ("zero1", "zero2", "zero3")},
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
    """fully_shard on every block and on the whole model, over all ranks: bf16 parameters and
    reductions; `offload`: its state rests in pinned host memory, where torch's fused AdamW runs."""

    def __init__(self, build: Build, settings: Settings, offload: bool = False):
        self._offload = offload
        super().__init__(build, settings)

    def _prepare(self) -> None:
        bf16 = torch.bfloat16
        mesh = dist.init_device_mesh(self._settings.device.type, (dist.get_world_size(),))
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


class DDP(Torch):
    """DistributedDataParallel around the usual loop: fp32 gradients on the wire."""

    def _prepare(self) -> None:
        super()._prepare()
        self._model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)


class DeepSpeed(peers.DeepSpeed):
    """ZeRO of the given stage: bf16 parameters and gradients, torch's fused AdamW."""

    def __init__(self, build: Build, settings: Settings, stage: int):
        model = build()
        recompute_blocks(model, settings)
        super().__init__(model, peers.Settings(lr=settings.lr, clip=settings.clip), stage)

    def finish(self) -> None:
        pass


class Penstock:
    """The engine with a strategy, and state where `tiers` says."""

    def __init__(self, build: Build, settings: Settings, strategy: str, tiers: dict[str, Any]):
        adam = {"type": "AdamW", "lr": settings.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}
        config: dict[str, Any] = {
            "strategy": strategy,
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


Trainer = Torch | DeepSpeed | Penstock
PEERS: dict[str, Callable[[Build, Settings], Trainer]] = {
    "torch autocast": Torch,
    "torch bf16": TorchMasters,
    "FSDP2": FSDP2,
    "FSDP2 host": functools.partial(FSDP2, offload=True),
    "DDP": DDP,
    **{name: functools.partial(DeepSpeed, stage=int(name[-1])) for name in peers.DEEPSPEED},
}
# In this order they share processes, as far as memory allows: on one rank, and on several.
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
RANKS = (
    "FSDP2",
    "ours zero3",
    "ours zero2",
    "ours zero1",
    "DDP",
    "DeepSpeed-3",
    "DeepSpeed-2",
    "DeepSpeed-1",
)
NEED_DEVICE = {"FSDP2 host"}


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Per parameter, where state rests: on each device, and in all on the devices of all ranks; in
    host memory, and there in pinned memory; on disk."""

    device: float = 0.0
    shard: float = 0.0
    host: float = 0.0
    pinned: float = 0.0
    disk: float = 0.0


BYTES = {
    "torch bf16": Bytes(device=14.0),
    "torch autocast": Bytes(device=12.0),
    "FSDP2": Bytes(shard=12.0),
    "FSDP2 host": Bytes(device=0.5, host=17.0),
    "ours device": Bytes(device=14.0),
    "ours host optimizer": Bytes(device=2.5, host=12.0, pinned=2.0),
    "ours all on host": Bytes(device=0.5, host=12.0, pinned=4.0),
    "ours all on disk": Bytes(device=0.5, host=1.0, disk=16.0),
    "ours zero1": Bytes(device=4.0, shard=12.0),
    "ours zero2": Bytes(device=2.0, shard=14.0),
    "ours zero3": Bytes(shard=16.0),
    "DDP": Bytes(device=16.0),
    "DeepSpeed-1": Bytes(device=4.0, shard=16.0),
    "DeepSpeed-2": Bytes(device=2.0, shard=18.0),
    "DeepSpeed-3": Bytes(shard=18.0),
}
# On the device, of the one whose turn it is: gradients, and what is cast; while one is made, its
# model in fp32.
WORKING_BYTES = 6.0


def why_missing(name: str, device: torch.device) -> str:
    """Why this trainer cannot run here; empty if it can."""
    if name in NEED_DEVICE and device.type == "cpu":
        return "needs an accelerator"
    if name in peers.DEEPSPEED and device.type == "sim":
        return "does not know the simulated device"
    return peers.why_missing(name)


def make(name: str, build: Build, settings: Settings) -> Trainer:
    """Makes a trainer of OURS or PEERS."""
    if name in OURS:
        return Penstock(build, settings, *OURS[name])
    return PEERS[name](build, settings)
