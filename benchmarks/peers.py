"""The same training step in torch, DDP, FSDP2, DeepSpeed and Penstock, for the benchmarks.

`make_trainer(name, model, settings)` returns an object with `step(inputs, targets)`, which is one
whole training step (zeroed gradients, forward, backward, clipping, AdamW) and returns the loss, and
`close()`. `model(inputs, targets)` must return the loss. The model is trained in place. Needs an
initialised process group except for "torch". Every trainer keeps fp32 master weights and moments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock

PENSTOCK = ("ddp", "zero1", "zero2", "zero3")
DEEPSPEED = ("DeepSpeed-1", "DeepSpeed-2", "DeepSpeed-3")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all trainers share. Micro-batch size only matters to DeepSpeed's bookkeeping."""

    precision: str = "bf16"
    lr: float = 1e-3
    clip: float = 0.0  # 0 = off
    accumulate: int = 1
    micro_batch: int = 1
    block_class: type[nn.Module] | None = None  # what FSDP2 and Penstock take as a unit
    adamw: str = "fused"  # or "foreach": the kernel of torch's AdamW

    def adam_options(self) -> dict:
        return {"lr": self.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def make_adam(self, params: list[torch.Tensor]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, **self.adam_options(), **{self.adamw: True})

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")


class Torch:
    """A loop in plain torch: fp32 weights, bf16 by autocast."""

    def __init__(self, model: nn.Module, settings: Settings):
        self._model, self._settings = model, settings
        self._params = list(model.parameters())
        self._adam = settings.make_adam(self._params)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._settings.autocast():
            loss = self._model(inputs, targets)
        loss.backward()
        if self._settings.clip:
            nn.utils.clip_grad_norm_(self._params, self._settings.clip)
        self._adam.step()
        self._adam.zero_grad()
        return loss.detach()

    def close(self) -> None:
        pass


class Compute(Torch):
    """Forward and backward of a rank's share in the compute dtype and nothing else: what no
    data-parallel trainer with the same kernels can beat."""

    def __init__(self, model: nn.Module, settings: Settings):
        self._model = model.bfloat16() if settings.precision == "bf16" else model

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._model(inputs, targets)
        loss.backward()
        self._model.zero_grad()
        return loss.detach()


class DDP(Torch):
    """The usual recipe: DistributedDataParallel, autocast, fp32 gradients on the wire."""

    def __init__(self, model: nn.Module, settings: Settings, back_end: str):
        super().__init__(model, settings)
        group = dist.new_group(backend=back_end)
        self._model = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )


class DDPWithMasters:
    """DDP over a bf16 model with hand-written fp32 masters: bf16 gradients on the wire."""

    def __init__(self, model: nn.Module, settings: Settings):
        self._masters = [param.detach().clone() for param in model.parameters()]
        self._adam = settings.make_adam(self._masters)
        self._model = DistributedDataParallel(model.bfloat16(), gradient_as_bucket_view=True)
        self._params = list(model.parameters())
        self._clip = settings.clip

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._model(inputs, targets)
        loss.backward()
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = param.grad.float()
        if self._clip:
            nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._adam.step()
        self._adam.zero_grad()
        self._model.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        return loss.detach()

    def close(self) -> None:
        pass


class NoWire(DDPWithMasters):
    """The loop of a rank without its peers: forward and backward of its share of the batch, then
    clipping and AdamW of its share of the weights, the first ones. Exchanges nothing."""

    def __init__(self, model: nn.Module, settings: Settings):
        whole = list(model.parameters())
        share = sum(param.numel() for param in whole) / dist.get_world_size()
        self._model = model.bfloat16() if settings.precision == "bf16" else model
        self._params, taken = [], 0
        for param in whole:
            if taken < share:
                self._params.append(param)
                taken += param.numel()
        self._masters = [param.detach().clone().float() for param in self._params]
        self._adam = settings.make_adam(self._masters)
        self._clip = settings.clip


class FSDP2(Torch):
    """fully_shard on every block and on the whole model; bf16 parameters and reductions."""

    def __init__(self, model: nn.Module, settings: Settings, back_end: str):
        policy = MixedPrecisionPolicy()
        if settings.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = DeviceMesh.from_group(dist.new_group(backend=back_end), "cpu")
        for module in model.modules():
            if settings.block_class is not None and isinstance(module, settings.block_class):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        super().__init__(model, dataclasses.replace(settings, precision="fp32"))


class DeepSpeed:
    """ZeRO of the given stage with bf16 and torch's AdamW."""

    def __init__(self, model: nn.Module, settings: Settings, stage: int):
        import deepspeed  # noqa: PLC0415 - optional, and slow to import

        config = {
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": settings.precision == "bf16"},
            "gradient_clipping": settings.clip,
        }
        adam = settings.make_adam(list(model.parameters()))
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        self._engine.destroy()


class Penstock:
    """Penstock with a strategy."""

    def __init__(self, model: nn.Module, settings: Settings, strategy: str):
        adam = {**settings.adam_options(), "type": "AdamW"}
        config = {
            "strategy": strategy,
            "precision": settings.precision,
            "optimizer": {**adam, "betas": list(adam["betas"])},
            "clip": settings.clip,
            "batch": {"accumulate": settings.accumulate},
        }
        if settings.block_class is not None:
            config["units"] = {"modules": [settings.block_class.__name__]}
        config |= json.loads(os.environ.get("PENSTOCK_BENCH_CONFIG", "{}"))
        self.engine = penstock.initialize(model, config)

    def exchanges(self) -> int:
        return self.engine.ledger()["measured"]["exchanges"]

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.close()


Trainer = Torch | DDPWithMasters | DeepSpeed | Penstock
_TRAINERS: dict[str, Callable[[nn.Module, Settings], Trainer]] = {
    "torch": Torch,
    "compute": Compute,
    "no wire": NoWire,
    "DDP": functools.partial(DDP, back_end="gloo"),
    "DDP-shm": functools.partial(DDP, back_end="penstock"),
    "DDP-bf16": DDPWithMasters,
    "FSDP2": functools.partial(FSDP2, back_end="gloo"),
    "FSDP2-shm": functools.partial(FSDP2, back_end="penstock"),
}


def why_missing(name: str) -> str:
    """Why this trainer cannot run here; empty when it can."""
    if name in DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    return ""


def make_trainer(name: str, model: nn.Module, settings: Settings) -> Trainer:
    """See the module's text. Names: "torch" "compute" "no wire" "DDP" "DDP-bf16" "FSDP2", two of
    them with "-shm" over Penstock's back end, not gloo; DEEPSPEED, PENSTOCK."""
    if name in PENSTOCK:
        return Penstock(model, settings, name)
    if name in DEEPSPEED:
        return DeepSpeed(model, settings, stage=int(name[-1]))
    return _TRAINERS[name](model, settings)
