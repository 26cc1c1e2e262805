"""What a step of the engine costs beside the model, on the simulated device: a rank's process runs
this. The same model, batch and loss in plain torch, without an optimizer, are the model's own."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import on_device
import sim
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES, STEPS, WARM = 128, 4, 4, 6
NORM = "aten::linalg_vector_norm"  # also of each unit's gradient, in backward


@dataclass(frozen=True)
class Setup:
    """One training run."""

    strategy: str = "zero2"
    groups: int = 1  # 2: parameters with and without decay, as of transformers' Trainer
    recompute: bool = False
    buffers: bool = False
    micro_batches: int = 1
    offload: dict[str, str] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "precision": "bf16",
            "batch": {"micro": SAMPLES, "accumulate": self.micro_batches},
            "clip": 0.01,  # below every norm
            "comm": {"timeout_s": 60, "bucket_bytes": 0},
            "prefetch_bytes": 0,
            "units": {"modules": ["Block"]},
            "activations": {"checkpoint": "unit"} if self.recompute else {},
            "offload": self.offload,
        }


@dataclass
class Cost:
    """Of one step. Bytes per parameter are per parameter that the rank updates."""

    launches: float = 0.0  # kernels and copies on the device, without the model's own
    update: float = 0.0  # bytes that are read and written, per parameter
    norm: float = 0.0
    temporaries: float = 0.0  # bytes of tensors on the device, per parameter, without the model's
    waits: dict[str, float] = field(default_factory=dict)  # of the host, by name
    peak: int = 0  # bytes of device memory in use
    ledger: int = 0  # those of them that the engine's ledger knows
    # Launches and bytes in all steps, without the model's own: the backward's, and those of step().
    in_backward: dict[str, sim.Tally] = field(default_factory=dict)
    in_step: dict[str, sim.Tally] = field(default_factory=dict)


class Block(nn.Module):
    def __init__(self, buffers: bool):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, blocks: int, buffers: bool):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(buffers) for _ in range(blocks))
        self.recompute = False  # here, not by the engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.float().square().mean()


def build(setup: Setup, blocks: int) -> Model:
    torch.manual_seed(0)
    model = Model(blocks, setup.buffers).bfloat16()
    return training.moved(model, on_device.device())


def optimizer_for(model: nn.Module, groups: int) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if groups == 1:
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    parts = ([p for p in params if p.ndim > 1], 0.1), ([p for p in params if p.ndim <= 1], 0.0)
    return torch.optim.AdamW([{"params": p, "weight_decay": decay} for p, decay in parts], lr=1e-3)


def batch() -> torch.Tensor:
    values = torch.arange(SAMPLES * WIDTH, dtype=torch.bfloat16).view(SAMPLES, WIDTH) / 100
    return values.to(on_device.device())


def of_the_model(setup: Setup, blocks: int) -> sim.Counters:
    """One step's forwards and backwards in plain torch."""
    model, x = build(setup, blocks), batch()
    model.recompute = setup.recompute
    for warm in (True, False):
        if not warm:
            sim.reset_counters()
        for _ in range(setup.micro_batches):
            model(x).backward()
            model.zero_grad(set_to_none=True)
    return sim.counters()


def counted(engine: Any, x: torch.Tensor, micro_batches: int) -> tuple[sim.Counters, sim.Counters]:
    """One step: what forwards and backwards did, and what step() did."""
    sim.reset_counters()
    for micro in range(micro_batches):
        engine.backward(engine(x))
        if micro + 1 == micro_batches:
            computed = sim.counters()
            sim.reset_counters()
        engine.step()
    return computed, sim.counters()


def add(cost: Cost, part: sim.Counters, by_name: dict[str, sim.Tally], sign: int = 1) -> None:
    """Adds a part of one of the steps to their means; with sign -1, takes it away."""
    cost.launches += sign * part.traffic.count / STEPS
    cost.temporaries += sign * part.temporaries.bytes / STEPS
    for name, tally in part.traffic_by_name.items():
        before = by_name.get(name, sim.Tally())
        sums = before.count + sign * tally.count, before.bytes + sign * tally.bytes
        by_name[name] = sim.Tally(*sums)
    for name, count in part.host_waits_by_name.items():
        cost.waits[name] = cost.waits.get(name, 0) + sign * count / STEPS


def measured(setup: Setup, blocks: int) -> Cost:
    """The means over some steps, on this rank."""
    import penstock  # noqa: PLC0415 - the parent does without

    on_device.schedule(0)
    own = of_the_model(setup, blocks)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model, x = build(setup, blocks), batch()
    shards = 1 if setup.strategy == "ddp" else dist.get_world_size()
    params = sum(param.numel() for param in model.parameters()) / shards
    engine = penstock.initialize(
        model, setup.config(), optimizer=optimizer_for(model, setup.groups)
    )
    for _ in range(WARM):
        counted(engine, x, setup.micro_batches)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    cost = Cost()
    for _ in range(STEPS):
        computed, stepped = counted(engine, x, setup.micro_batches)
        add(cost, computed, cost.in_backward)
        add(cost, own, cost.in_backward, sign=-1)
        add(cost, stepped, cost.in_step)
    cost.peak = torch.accelerator.max_memory_allocated() - before
    cost.ledger = engine.ledger()["measured"]["device"]
    engine.close()
    cost.temporaries /= params
    cost.waits = {name: count for name, count in cost.waits.items() if count != 0}
    for name, tally in [*cost.in_backward.items(), *cost.in_step.items()]:
        cost.norm += tally.bytes / STEPS / params if name.startswith(NORM) else 0.0
    for name, tally in cost.in_step.items():
        cost.update += 0.0 if name.startswith(NORM) else tally.bytes / STEPS / params
    return cost
