"""Idle time of a pipeline's ranks under each schedule, on layers that wait instead of computing.

    python benchmarks/bubble.py [--ranks 4] [--micro 8] [--ms 20] [--json FILE]

Each rank has one layer. Its forward, its input gradients and its weight gradients sleep `--ms`
milliseconds each, so ranks that share cores do not slow each other down. The bubble is the time in
which ranks do not compute, from the first forward of a step to the last backward, divided by the
time in which they do. The simulator's bubble (`simulated_bubble`) is for stages that take the
measured times. The last column is the time of a whole step beyond the layer's sleeps, divided by
these; torch's 1F1B runs in turn with the engines, without an optimizer.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
from measure import interleave, launch, machine, run_rank, write_json
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from penstock._native import _penstock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from pipeline_report import Clock, Done, gather

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


def seconds_of(row: list[Done], forward: bool) -> float:
    """A stage's mean seconds for a micro-batch, in one direction."""
    own = [one.end - one.begin - one.waited for one in row if one.forward == forward]
    return sum(own) / len({one.micro for one in row})


def bubbles(schedule: str, windows: list[list[Done]]) -> tuple[float, float]:
    """Measured and simulated, medians over steps. All ranks call it."""
    measured, simulated = [], []
    for rows in zip(*gather(windows), strict=True):
        every = [one for row in rows for one in row]
        busy = sum(one.end - one.begin - one.waited for one in every)
        whole = max(one.end for one in every) - min(one.begin for one in every)
        stages = [(seconds_of(row, True), seconds_of(row, False)) for row in rows]
        micro = len({one.micro for one in every})
        measured.append(len(rows) * whole / busy - 1)
        simulated.append(_penstock.simulated_bubble(schedule, len(rows), micro, stages))
    return statistics.median(measured), statistics.median(simulated)


def work(options: argparse.Namespace) -> dict[str, Any]:
    engines = {schedule: ours(schedule, options) for schedule in SCHEDULES}
    clocks = {schedule: Clock(engine) for schedule, (engine, _) in engines.items()}
    steps = {schedule: step for schedule, (_, step) in engines.items()}
    seconds = interleave(steps | {"torch 1F1B": torchs(options)}, options.rounds, 1)
    sleeps = 3 * options.micro * options.ms / 1e3
    figures = {
        "bubbles": {name: bubbles(name, list(clocks[name].windows)[2:]) for name in SCHEDULES},
        "beyond": {name: statistics.median(taken) / sleeps - 1 for name, taken in seconds.items()},
    }
    for engine, _ in engines.values():
        engine.close()
    return figures


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
    arguments = [
        f"--{name}={getattr(options, name)}" for name in ("ranks", "micro", "ms", "rounds")
    ]
    figures = launch(__file__, arguments, options.ranks)
    print(f"{options.ranks} ranks, {options.micro} micro-batches, {options.ms} ms a part")
    print(f"{'':12}{'measured':>10}{'simulated':>11}{'step':>8}")
    for name, beyond in figures["beyond"].items():
        own = figures["bubbles"].get(name)
        bubble = "".join(f"{one:>{10 + i}.3f}" for i, one in enumerate(own or ())) or " " * 21
        print(f"{name:12}{bubble}{beyond:>8.3f}")
    write_json(options.json, figures | {"machine": machine()})
    return None


if __name__ == "__main__":
    main()
