"""Training the models of models.py: plainly in one process, and by Penstock on a pool's ranks."""

from __future__ import annotations

import copy
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import nn

Tensors = dict[str, torch.Tensor]

STEPS = 20
MICRO = 2  # samples per rank and backward
ADAMW = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
# Below every gradient norm of the first steps of that model.
CLIP = {"gpt": 0.25, "awkward": 1.0}


@dataclass(frozen=True)
class Case:
    strategy: str = "zero3"
    precision: str = "fp32"
    accumulate: int = 1
    world: int = 2
    recompute: str = "off"  # activation checkpointing
    model: str = "gpt"
    clip: bool = False

    @property
    def samples(self) -> int:
        return self.world * self.accumulate * MICRO

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "precision": self.precision,
            "optimizer": {"type": "AdamW"} | ADAMW,
            "batch": {"micro": MICRO, "accumulate": self.accumulate},
            "clip": CLIP[self.model] if self.clip else 0.0,
            "comm": {"timeout_s": 60},
            "mesh": {"node": 2} if self.strategy in ("hpz", "mics") else {},
        }

    def __str__(self) -> str:
        clip = "-clip" if self.clip else ""
        return (
            f"{self.strategy}-{self.precision}-world{self.world}-accumulate{self.accumulate}"
            f"-{self.model}-{self.recompute}{clip}"
        )


@dataclass
class Run:
    """What a training run gave."""

    gradients: Tensors = field(default_factory=dict)  # of the first step, before clipping
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)  # fp32


def initial_weights(model: str, trained: bool) -> Tensors:
    """By name, of the parameters that train, or of the frozen and the unused ones."""
    return {
        name: value.detach()
        for name, value in models.build(model).named_parameters()
        if trained == (value.requires_grad and "never" not in name)
    }


def _copy_bf16(master: nn.Module) -> nn.Module:
    """The model as bf16 training computes it: parameters cast, buffers kept."""
    model = copy.deepcopy(master)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def _backward_bf16(master: nn.Module, batch: tuple[torch.Tensor, ...]) -> float:
    """The mean loss by a bf16 copy; its gradients go to the fp32 masters. Micro-batches are those
    of the ranks, since a gradient is rounded after each."""
    model = _copy_bf16(master)
    parts = len(batch[0]) // MICRO
    total = 0.0
    for part in zip(*(tensor.split(MICRO) for tensor in batch), strict=True):
        loss = model(*part)
        loss.backward()
        total += loss.item() / parts
        for parameter, kept in zip(model.parameters(), master.parameters(), strict=True):
            if parameter.grad is not None:
                share = parameter.grad.float() / parts
                kept.grad = share if kept.grad is None else kept.grad + share
                parameter.grad = None
    return total


def _backward(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> float:
    loss = model(*batch)
    loss.backward()
    return loss.item()


@functools.cache
def reference(name: str, samples: int, clip: float, precision: str = "fp32") -> Run:
    """Plain torch, one process, the whole batch."""
    model = models.build(name)
    backward = _backward_bf16 if precision == "bf16" else _backward
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    run = Run()
    for batch in models.batches(name, STEPS, samples):
        loss = backward(model, batch)
        if not run.losses:
            run.gradients = {
                key: parameter.grad.clone()
                for key, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        limit = clip if clip > 0 else float("inf")
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        run.losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {key: value.detach() for key, value in model.state_dict().items()}
    return run


def rank_part(batch: tuple[torch.Tensor, ...], micro: int) -> tuple[torch.Tensor, ...]:
    """This rank's samples of a micro-batch of the whole batch."""
    first = (micro * dist.get_world_size() + dist.get_rank()) * MICRO
    return tuple(part[first : first + MICRO] for part in batch)


def digest(model: nn.Module) -> str:
    """Of every parameter's bytes: equal on ranks that hold the same weights."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().float().numpy().tobytes())
    return total.hexdigest()


def backwards(engine: Any, batch: tuple[torch.Tensor, ...], accumulate: int) -> float:
    """One window's forwards and backwards; this rank's mean loss."""
    losses = []
    for micro in range(accumulate):
        loss = engine(*rank_part(batch, micro))
        engine.backward(loss)
        losses.append(loss.item())
        if micro + 1 < accumulate:
            assert engine.step() is False, "step() in the middle of a window changed weights"
    return sum(losses) / accumulate


def train(case: Case) -> tuple[Run, str]:
    """On a rank: `case` by Penstock; the run (tensors on rank 0 only) and the digest of the model
    that close() leaves."""
    import penstock  # noqa: PLC0415 - the reference does without

    model = models.build(case.model, case.recompute)
    engine = penstock.initialize(model, case.config())
    run = Run()
    for batch in models.batches(case.model, STEPS, case.samples):
        run.losses.append(backwards(engine, batch, case.accumulate))
        if len(run.losses) == 1:
            gradients = engine.full_grads()
            assert all(g.dtype == torch.float32 for g in gradients.values())
            run.gradients = gradients if dist.get_rank() == 0 else {}
        assert engine.step() is True, "step() at the end of a window changed nothing"
        run.norms.append(engine.grad_norm)
    run.weights = engine.state_dict()
    engine.close()
    return run, digest(model)
