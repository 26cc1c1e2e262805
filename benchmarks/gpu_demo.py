"""The GPT of `make demo` on a device, trained by Penstock beside plain torch, in two minutes.

    python benchmarks/gpu_demo.py [--device cuda] [--budget-s 120] [--json FILE]

Both start from the same seed and see the same text (the Python standard library's own source, as in
examples/train_gpt.py), in turns of a few steps in one process. Both compute in bf16 with fp32
masters and torch's fused AdamW, so the losses should stay close. "Loss at the end" is the mean of
the last ten steps.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
from typing import Any

import accelerator
import gpu_trainers
import torch
from accelerator import MIB, Deadline
from gpu_runs import Rounds, count, gap
from measure import ratio, write_json

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import train_gpt  # noqa: E402
from gpt import GPT, Block, GPTConfig  # noqa: E402

TRAINERS = {"plain torch": "torch bf16", "Penstock": "ours device"}
LAYERS, WIDTH, SEQ = 4, 448, 128  # those of the demo
LAST = 10
GAP = 0.02  # relative, of the first losses in bf16


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help='"cuda", "sim", "cpu"')
    add("--budget-s", type=float, default=120.0)
    add("--batch", type=int, help="windows per step")
    add("--json", help="file for all figures")
    options = parser.parse_args()
    real = options.device not in ("cpu", "sim")
    options.batch = options.batch or (64 if real else 2)
    options.seq = SEQ if real else 32
    options.steps, options.rounds = (50, 40) if real else (2, 3)
    return options


def config_of(options: argparse.Namespace) -> GPTConfig:
    layers, width = (LAYERS, WIDTH) if options.device not in ("cpu", "sim") else (2, 64)
    return GPTConfig(layers, width, width // 64, context=options.seq)


class Run:
    """A trainer, its windows of the text and the losses it had."""

    def __init__(self, name: str, text: torch.Tensor, options: argparse.Namespace, device: Any):
        def build() -> GPT:
            torch.manual_seed(0)
            with torch.device(device):
                return GPT(config_of(options))

        settings = gpu_trainers.Settings(device, Block, recompute=False, lr=3e-4)
        before = accelerator.allocated_bytes(device)
        self._device = device
        self._trainer = gpu_trainers.make(name, build, settings)
        self._windows = train_gpt.Windows(text, options, train_gpt.Ranks(0, 1), seed=0)
        self.losses: list[torch.Tensor] = []
        accelerator.reset_peak(device)
        for _ in range(2):
            self.step()
        accelerator.synchronize(device)
        self.device_bytes = accelerator.peak_bytes(device) - before

    def step(self) -> None:
        inputs, targets = (half.to(self._device) for half in self._windows.next())
        self.losses.append(self._trainer.step(inputs, targets).float())

    def finish(self) -> None:
        self._trainer.finish()


def measured(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Figures by trainer."""
    deadline = Deadline(options.budget_s - 10.0)  # for the end
    text, _ = train_gpt.read_text(None)
    runs = {name: Run(which, text, options, device) for name, which in TRAINERS.items()}
    rounds = Rounds(deadline, options.rounds)
    found: dict[str, list[float]] = {}

    def may_go_on(seconds: dict[str, list[float]]) -> bool:
        found.update(seconds)
        return rounds.may_go_on()

    actions = {name: (run.step, run.finish) for name, run in runs.items()}
    accelerator.take_turns(device, actions, options.steps, may_go_on)
    if min(map(len, found.values())) < 2:
        raise SystemExit(f"two rounds do not fit in --budget-s {options.budget_s:g}")
    figures = {}
    for name, run in runs.items():
        losses = torch.stack(run.losses).tolist()
        step_s = statistics.median(found[name])
        figures[name] = {
            "step_s": step_s,
            "seconds": found[name],
            "tokens_per_s": options.batch * options.seq / step_s,
            "device_bytes": run.device_bytes,
            "losses": losses,
            "last_loss": statistics.fmean(losses[-LAST:]),
        }
    return figures


def show(figures: dict[str, Any], whole: dict[str, Any]) -> None:
    one = next(iter(figures.values()))
    size = f"a GPT of {whole['parameters'] / 1e6:.1f}M parameters in bf16"
    print(f"{whole['machine']['name']}: {size}, {len(one['losses'])} steps each")
    print(f"{'':<14}{'ms/step':>9}{'tokens/s':>11}{'device MiB':>12}{'first loss':>12}", end="")
    print(f"{'loss at the end':>17}")
    for name, one in figures.items():
        print(
            f"{name:<14}{1000 * one['step_s']:>9.2f}{one['tokens_per_s']:>11.0f}"
            f"{one['device_bytes'] / MIB:>12.0f}{one['losses'][0]:>12.4f}{one['last_loss']:>17.4f}"
        )
    median, low, high = whole["ratio"]
    print(f"Penstock / plain torch: {median:.3f} of the time ({low:.3f}-{high:.3f})")


def main() -> None:
    options = parse_options()
    device = accelerator.open_device(options.device)
    figures = measured(options, device)
    theirs, ours = figures.values()
    whole = {
        "machine": accelerator.described(device),
        "parameters": count(config_of(options))[0],
        "by_trainer": figures,
        "ratio": ratio(ours["seconds"], theirs["seconds"]),
        "gap": gap(ours["losses"][:LAST], theirs["losses"][:LAST]),
    }
    show(figures, whole)
    write_json(options.json, whole)
    sys.stdout.flush()
    failed = whole["gap"] > GAP
    if failed:
        print(f"the first {LAST} losses are {whole['gap']:.3f} apart", file=sys.stderr, flush=True)
    os._exit(int(failed))


if __name__ == "__main__":
    main()
