"""How much of the host's optimizer shows in a step, with and without late updates.

    python benchmarks/offload_overlap.py [--flops 2e12] [--link 25e9] [--json FILE]

The device is emulated: a unit computes for the larger of the time its floating-point operations
take at `--flops` and the time its bf16 parameters take over a link of `--link` bytes/s, and leaves
the processor idle for that long, as a thread that has launched kernels does. Parameters and
optimizer rest on the host. Two engines, one with `offload.late_update`, take steps in turn on the
same batches: their losses must be equal bit for bit.

The optimizer's time U is what step() takes without late updates, less what it takes with them (the
norm). What shows of it is U less what late updates save in the whole step.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import torch
from measure import machine, write_json
from torch import nn

import penstock

STEPS = 4  # of one engine in a row; the first of them is not timed


@dataclasses.dataclass(frozen=True)
class Device:
    """The emulated one; rates in operations and bytes per second."""

    flops: float
    link: float
    tokens: int

    def wait(self, params: int, passes: int) -> None:
        compute = 2.0 * params * self.tokens * passes / self.flops
        time.sleep(max(compute, 2.0 * params / self.link))


class OnDevice(torch.autograd.Function):
    """The identity; its backward takes a unit's backward time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, params: int) -> torch.Tensor:
        ctx.device, ctx.params = device, params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.device.wait(ctx.params, 2)
        return gradient, None, None


class Block(nn.Module):
    """One large matrix; only one row of the input is real, so the processor has little to do."""

    def __init__(self, width: int, device: Device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params = self.linear.weight.numel()
        self.device.wait(params, 1)
        return x + OnDevice.apply(torch.tanh(self.linear(x)), self.device, params)


class Chain(nn.Module):
    """Blocks in a row; the mean square of what comes out."""

    def __init__(self, blocks: int, width: int, device: Device) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, device) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Run:
    """One engine; `step()` keeps how long the whole step and the optimizer's call took."""

    def __init__(self, options: argparse.Namespace, late: bool) -> None:
        torch.manual_seed(0)
        device = Device(options.flops, options.link, options.tokens)
        offload = {"optimizer": "host", "params": "host", "late_update": late}
        self.engine = penstock.initialize(
            Chain(options.blocks, options.width, device),
            {
                "strategy": "zero3",
                "precision": "bf16",
                "offload": offload,
                "optimizer": {"type": "AdamW", "lr": 1e-4},
                "clip": 1.0,
            },
        )
        self.losses: list[float] = []
        self.whole: list[float] = []
        self.update: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        begin = time.perf_counter()
        loss = self.engine(batch)
        self.engine.backward(loss)
        before = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        self.losses.append(loss.item())
        self.whole.append(end - begin)
        self.update.append(end - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flops", type=float, default=2e12, help="operations per second (2e12)")
    parser.add_argument("--link", type=float, default=25e9, help="bytes per second (25e9)")
    parser.add_argument("--tokens", type=int, default=2048, help="per step, for the time (2048)")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5, help="of 4 steps of each engine (5)")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    runs = {late: Run(options, late) for late in (False, True)}
    batches = torch.randn(options.rounds * STEPS, 1, options.width).bfloat16()
    for i in range(options.rounds):
        for late in (False, True) if i % 2 else (True, False):
            for batch in batches[i * STEPS : (i + 1) * STEPS]:
                runs[late].step(batch)
            time.sleep(1.0)  # the last late update is not to disturb the other engine
    report(options, runs[False], runs[True])
    for run in runs.values():
        run.engine.close()


def report(options: argparse.Namespace, plain: Run, late: Run) -> None:
    assert plain.losses == late.losses, "late updates changed the losses"
    timed = [i for i in range(len(plain.whole)) if i % STEPS > 0 and i >= STEPS]
    in_place, after = ([run.update[i] for i in timed] for run in (plain, late))
    optimizer = statistics.median(a - b for a, b in zip(in_place, after, strict=True))
    saved = statistics.median(plain.whole[i] - late.whole[i] for i in timed)
    print(machine())
    print(
        f"step, update in place   {statistics.median(plain.whole[i] for i in timed) * 1e3:8.1f} ms"
    )
    print(
        f"step, late update       {statistics.median(late.whole[i] for i in timed) * 1e3:8.1f} ms"
    )
    print(f"optimizer               {optimizer * 1e3:8.1f} ms")
    print(f"of which shows          {(optimizer - saved) * 1e3:8.1f} ms", end="")
    print(f" = {1 - saved / optimizer:.1%}; losses of {len(late.losses)} steps bitwise equal")
    figures = {"whole": [plain.whole, late.whole], "update": [plain.update, late.update]}
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
