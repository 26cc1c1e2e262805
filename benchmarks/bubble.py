"""Idle time of a pipeline's ranks under each schedule, on layers that wait instead of computing.

    python benchmarks/bubble.py [--ranks 4] [--micro 8] [--ms 20] [--json FILE]

Each rank has one layer. Its forward, its input gradients and its weight gradients sleep `--ms`
milliseconds each, so ranks that share cores do not slow each other down. The bubble is the time of
a step beyond the layer's own time, divided by that time. It therefore includes everything that the
engine does in a step. It is printed beside the simulator's (`simulated_bubble`) and torch's 1F1B.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from measure import interleave, launch, machine, run_rank, write_json
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from penstock._native import _penstock

WIDTH = 64
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


class Wait(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None, None


class Layer(nn.Module):
    """A product whose three parts each take `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.eye(WIDTH) * 0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Wait.apply(self.weight, 0.0, self.seconds)
        return nn.functional.linear(Wait.apply(x, self.seconds, self.seconds), weight)


class Chain(nn.Module):
    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seconds) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(options: argparse.Namespace) -> torch.Tensor:
    # The first stage's input needs a gradient, as an embedding's output does.
    return torch.ones(options.micro, WIDTH).requires_grad_()


def ours(schedule: str, options: argparse.Namespace) -> Any:
    config = {
        "strategy": "ddp",
        "mesh": {"pipeline": options.ranks},
        "batch": {"accumulate": options.micro},
        "parallel": {"schedule": schedule},
        "units": {"layer_bytes": 1},
    }
    engine = penstock.initialize(Chain(options.ranks, options.ms / 1e3), config)
    return engine, lambda: engine.train_batch(batch(options))


def torchs(options: argparse.Namespace) -> Any:
    rank = torch.distributed.get_rank()
    layer: nn.Module = Layer(options.ms / 1e3)
    stage = PipelineStage(layer, rank, options.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro, loss_fn=lambda out, _: out.square().mean())

    def step() -> None:
        layer.zero_grad()
        if rank == 0:
            schedule.step(batch(options))
        elif rank == options.ranks - 1:
            schedule.step(target=torch.zeros(options.micro, WIDTH))
        else:
            schedule.step()

    return step


def work(options: argparse.Namespace) -> dict[str, Any]:
    engines = {schedule: ours(schedule, options) for schedule in SCHEDULES}
    steps = {schedule: step for schedule, (_, step) in engines.items()}
    seconds = interleave(steps | {"torch 1F1B": torchs(options)}, options.rounds, 1)
    own = 3 * options.micro * options.ms / 1e3
    part = options.ms / 1e3
    figures = {name: statistics.median(taken) / own - 1 for name, taken in seconds.items()}
    for engine, _ in engines.values():
        engine.close()
    simulated = {
        name: _penstock.simulated_bubble(
            name, options.ranks, options.micro, [(part, 2 * part)] * options.ranks
        )
        for name in SCHEDULES
    }
    return {"measured": figures, "simulated": simulated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="stages, each on a rank of its own")
    add("--micro", type=int, default=8, help="micro-batches of a step")
    add("--ms", type=float, default=20.0, help="milliseconds of a layer's forward")
    add("--rounds", type=int, default=5, help="timed rounds")
    add("--json", help="file for the figures")
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        return run_rank(work, options)
    arguments = [f"--{name}={getattr(options, name)}" for name in ("ranks", "micro", "ms", "rounds")]
    figures = launch(__file__, arguments, options.ranks)
    print(f"{options.ranks} ranks, {options.micro} micro-batches, {options.ms} ms a part")
    for name, measured in figures["measured"].items():
        simulated = figures["simulated"].get(name)
        beside = "" if simulated is None else f", simulated {simulated:.3f}"
        print(f"{name:12} bubble {measured:.3f}{beside}")
    write_json(options.json, figures | {"machine": machine()})
    return None


if __name__ == "__main__":
    main()
