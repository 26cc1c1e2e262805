"""Training the models of models.py and zoo.py: plainly in one process, and by Penstock on a pool's
ranks."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import back_ends
import tensor_models
import torch
import torch.distributed as dist
import zoo
from torch import nn
from zoo import Part, Place

Tensors = dict[str, torch.Tensor]
Loss = Callable[[Any, Part], torch.Tensor]  # of a model or an engine, on some samples

STEPS = 20
BY_NODE = {"hpz", "hpz_host", "mics"}  # strategies that tell nodes apart
MICRO = 2  # samples per rank and backward
ADAMW = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
# Below every gradient norm of the first steps of that model.
CLIP = {"gpt": 0.25, "parts": 0.25, "awkward": 1.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 1024.0  # of fp16: far from overflow, and as good as what a dynamic scale ends at


@dataclass(frozen=True)
class Case:
    strategy: str = "zero3"
    precision: str = "fp32"
    accumulate: int = 1
    world: int = 2
    recompute: str = "off"  # activation checkpointing
    model: str = "gpt"
    clip: bool = False
    tensor: int = 1  # ranks that compute one model together

    @property
    def samples(self) -> int:
        return self.world // self.tensor * self.accumulate * MICRO

    def config(self) -> dict[str, Any]:
        # In the zoo, two and four ranks move each unit, a layer too, by itself and in time,
        # others early and together.
        alone = self.model in zoo.ZOO and self.world % 2 == 0
        entry = zoo.ENTRIES[self.model]
        # Ranks that differ have to run layers in the order of the modules, which the zoo does not.
        layer_bytes = 1 if alone and not entry.by_rank else entry.layer_bytes
        return ({"prefetch_bytes": 0} if alone else {}) | {
            "strategy": self.strategy,
            "precision": None if self.precision == "own" else self.precision,
            "optimizer": {"type": "AdamW"} | ADAMW,
            "batch": {"micro": MICRO, "accumulate": self.accumulate},
            "clip": CLIP[self.model] if self.clip else 0.0,
            "comm": {"timeout_s": 120} | ({"bucket_bytes": 0} if alone else {}),
            "units": {"modules": entry.units, "layer_bytes": layer_bytes},
            "loss_scale": {"initial": LOSS_SCALE} if self.precision == "fp16" else {},
            "mesh": self.mesh(),
            "parallel": {"rules": tensor_models.rules(self.tensor)} if self.tensor > 1 else {},
        }

    def mesh(self) -> dict[str, int]:
        nodes = min(2, self.world // self.tensor) if self.strategy in BY_NODE else 1
        return {"node": nodes, "tensor": self.tensor}

    def __str__(self) -> str:
        clip = "-clip" if self.clip else ""
        clip += f"-tensor{self.tensor}" if self.tensor > 1 else ""
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
    buffers: list[Tensors] = field(default_factory=list)  # by rank
    ledger: dict[str, Any] = field(default_factory=dict)


def moved(model: nn.Module, device: str) -> nn.Module:
    """The model there. A device that no torch knows by name gets new tensors, which take the place
    of the old ones inside the Parameter objects, so that tied weights stay tied."""
    if device == "cpu":
        return model
    torch.__future__.set_swap_module_params_on_conversion(device.startswith("sim"))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def sent(part: Part, device: str) -> Part:
    return tuple(tensor.to(device) for tensor in part)


def initial_weights(model: str, trained: bool) -> Tensors:
    """By name, of the parameters that train, or of the frozen and the unused ones."""
    return {
        name: value.detach()
        for name, value in zoo.build(model).named_parameters()
        if trained == (value.requires_grad and "never" not in name)
    }


def compute_dtypes(model: nn.Module, precision: str) -> list[torch.dtype]:
    """Of each parameter; "own" is as the model was built."""
    return [DTYPES.get(precision, parameter.dtype) for parameter in model.parameters()]


class Reference:
    """fp32 weights, and a copy of the model for each rank that computes with them in other dtypes.
    Copies keep their buffers: these are never cast, and each rank's live by themselves."""

    def __init__(self, model: nn.Module, precision: str, ranks: int):
        self.dtypes = compute_dtypes(model, precision)
        self.scale = LOSS_SCALE if torch.float16 in self.dtypes else 1.0
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        self.master = model
        self.copies = [copy.deepcopy(model) for _ in range(ranks)]

    def backward(self, entry: zoo.Entry, parts: list[Part], step: int) -> float:
        """The mean loss over the parts, which belong to the ranks in turn; its gradients go to the
        fp32 weights. A gradient is rounded after each part."""
        total = 0.0
        for index, part in enumerate(parts):
            rank = index % len(self.copies)
            model = self.copies[rank]
            pairs = list(zip(model.parameters(), self.master.parameters(), strict=True))
            for (own, kept), dtype in zip(pairs, self.dtypes, strict=True):
                own.data = kept.data.to(dtype)
            loss = entry.loss(model, part, Place(step, rank))
            (loss * self.scale).backward()
            total += loss.item() / len(parts)
            for own, kept in pairs:
                if own.grad is not None:
                    share = own.grad.float() / (self.scale * len(parts))
                    kept.grad = share if kept.grad is None else kept.grad + share
                    own.grad = None
        return total


@functools.cache
def reference(  # noqa: PLR0913 - what makes two references differ
    name: str,
    samples: int,
    clip: float = 0.0,
    precision: str = "fp32",
    world: int = 1,
    device: str = "cpu",
) -> Run:
    """Plain torch, one process, the whole batch; or one micro-batch after the other in low
    precision, since a gradient is rounded after each, and where the model makes it differ."""
    entry = zoo.ENTRIES[name]
    plain = Reference(moved(zoo.build(name), device), precision, world)
    model = plain.master
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    run = Run()
    for step, batch in enumerate(zoo.batches(name, samples)):
        by_parts = entry.by_rank or precision != "fp32"
        parts = [sent(part, device) for part in (split(batch) if by_parts else [batch])]
        loss = plain.backward(entry, parts, step)
        if not run.losses:
            run.gradients = {
                key: parameter.grad.to("cpu", copy=True)
                for key, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        limit = clip if clip > 0 else float("inf")
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        run.losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.buffers = [on_cpu(dict(one.named_buffers())) for one in plain.copies]
    run.weights = on_cpu({key: value.detach() for key, value in model.state_dict().items()})
    run.weights |= run.buffers[0]
    return run


def on_cpu(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def split(batch: Part) -> list[Part]:
    """A batch's micro-batches."""
    return list(zip(*(tensor.split(MICRO) for tensor in batch), strict=True))


def rank_part(batch: Part, micro: int, tensor: int = 1) -> Part:
    """This rank's samples of a micro-batch of the whole batch; `tensor` ranks have the same."""
    return split(batch)[micro * (dist.get_world_size() // tensor) + dist.get_rank() // tensor]


def digest(model: nn.Module) -> str:
    """Of every parameter's bytes: equal on ranks that hold the same weights."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().float().cpu().numpy().tobytes())
    return total.hexdigest()


def output(engine: Any, part: Part) -> torch.Tensor:
    return engine(*part)


def backwards(
    engine: Any, batch: Part, accumulate: int, loss_of: Loss = output, device: str = "cpu"
) -> float:
    """One window's forwards and backwards; this rank's mean loss."""
    losses, tensor = [], engine.config.mesh.tensor
    for micro in range(accumulate):
        loss = loss_of(engine, sent(rank_part(batch, micro, tensor), device))
        engine.backward(loss)
        losses.append(loss.item())
        if micro + 1 < accumulate:
            assert engine.step() is False, "step() in the middle of a window changed weights"
    return sum(losses) / accumulate


def train_with(case: Case, settings: dict[str, Any]) -> tuple[Run, str]:
    return train(case, **settings)


def train(
    case: Case, device: str = "cpu", grouped: bool = False, **overrides: Any
) -> tuple[Run, str]:
    """On a rank: `case`, with `overrides` of its config, by Penstock; the run (gradients and
    weights on rank 0 only) and the digest of the model that close() leaves. `grouped`: every
    second parameter is in another group of torch's optimizer, with the same settings."""
    import penstock  # noqa: PLC0415 - the reference does without

    model = moved(zoo.build(case.model, case.recompute), device)
    dtypes = compute_dtypes(model, case.precision)
    entry, rank = zoo.ENTRIES[case.model], dist.get_rank()
    for buffer in model.buffers():
        buffer.add_(rank)  # rank 0's count
    config = case.config() | overrides
    if torch.device(device).type == "cpu":
        config["comm"] = {"backend": back_ends.of_case(case)} | config["comm"]
    optimizer = None
    if grouped:
        del config["optimizer"]
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": params[::2]}, {"params": params[1::2]}]
        optimizer = torch.optim.AdamW(groups, **ADAMW)
    engine = penstock.initialize(model, config, optimizer=optimizer)
    assert [p.dtype for p in model.parameters()] == dtypes, "initialize() changed dtypes"
    run = Run()
    for step, batch in enumerate(zoo.batches(case.model, case.samples)):
        place = Place(step, rank)
        loss_of = functools.partial(entry.loss, place=place)
        run.losses.append(backwards(engine, batch, case.accumulate, loss_of, device))
        if len(run.losses) == 1:
            gradients = engine.full_grads()
            assert all(g.dtype == torch.float32 for g in gradients.values())
            run.gradients = on_cpu(gradients) if rank == 0 else {}
        assert engine.step() is True, "step() at the end of a window changed nothing"
        run.norms.append(engine.grad_norm)
    run.weights = on_cpu(engine.state_dict())
    run.ledger = engine.ledger()
    run.buffers = [on_cpu(dict(model.named_buffers()))]
    engine.close()
    return run, digest(model)
