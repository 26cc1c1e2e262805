"""What an engine costs when there is nothing to compute: 600 tiny parameters on one rank.

    python benchmarks/engine_overhead.py [--json FILE]

300 linear layers of 16 x 16 with bias, in 20 blocks. Every trainer does the same step (forward,
backward, AdamW) in the same process, in turn; ratios are taken round by round against a loop in
plain torch with each of its two fast AdamW kernels.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from measure import init_group, interleave, machine, ratio, write_json
from peers import PENSTOCK, Settings, make_trainer
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS_PER_BLOCK, NUM_BLOCKS, ROWS = 16, 15, 20, 8
COMPARED_STEPS = 50  # later the loss is so small that any order of additions gives another
# Trainer and torch's AdamW kernel; Penstock has its own.
TRAINERS = {
    "torch fused": ("torch", "fused"),
    "torch foreach": ("torch", "foreach"),
    "DDP": ("DDP", "fused"),
    "FSDP2": ("FSDP2", "fused"),
    **{name: (name, "fused") for name in PENSTOCK},
}


class Block(nn.Module):
    """Linear layers with tanh between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS_PER_BLOCK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Chain(nn.Module):
    """Blocks in a row; returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return F.mse_loss(inputs, targets)


class Run:
    """One trainer on inputs that are the same for all."""

    def __init__(self, kind: str, adamw: str):
        torch.manual_seed(0)
        model = Chain()
        self.num_tensors = len(list(model.parameters()))
        settings = Settings(precision="fp32", block_class=Block, adamw=adamw)
        self._batch = torch.randn(2, ROWS, WIDTH).unbind()
        self._trainer = make_trainer(kind, model, settings)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.losses.append(self._trainer.step(*self._batch))

    def close(self) -> None:
        self._trainer.close()


def report(seconds: dict[str, list[float]], runs: dict[str, Run]) -> None:
    print(
        f"{'trainer':<15}{'ms/step':>9}{'/ fused':>9}{'quartiles':>15}{'/ foreach':>11}"
        f"{'us/tensor':>11}{'loss':>12}{'gap':>9}"
    )
    reference = runs["torch fused"].losses[:COMPARED_STEPS]
    for name, times in seconds.items():
        losses = runs[name].losses[:COMPARED_STEPS]
        gap = max(float(abs(a - b) / b) for a, b in zip(losses, reference, strict=True))
        median, low, high = ratio(times, seconds["torch fused"])
        span = f"{low:.3f}-{high:.3f}"
        extra = [a - b for a, b in zip(times, seconds["torch fused"], strict=True)]
        per_tensor = 1e6 * statistics.median(extra) / runs[name].num_tensors
        print(
            f"{name:<15}{1000 * statistics.median(times):>9.2f}{median:>9.3f}{span:>15}"
            f"{ratio(times, seconds['torch foreach'])[0]:>11.3f}{per_tensor:>11.2f}"
            f"{float(losses[-1]):>12.6f}{gap:>9.1e}"
        )
    print(
        "us/tensor: time over the fused torch loop per parameter tensor; loss: after "
        f"{len(reference)} steps; gap: largest relative difference up to there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per trainer and round")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_group()
    runs = {name: Run(*kind) for name, kind in TRAINERS.items()}
    actions = {name: run.step for name, run in runs.items()}
    seconds = interleave(actions, options.rounds, options.steps)
    report(seconds, runs)
    for run in runs.values():
        run.close()
    losses = {name: [float(loss) for loss in run.losses] for name, run in runs.items()}
    write_json(options.json, {"machine": machine(), "seconds": seconds, "losses": losses})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
