"""What looking costs: the step of train_gpt.py with nothing recorded, with the timeline that is
always kept, and with everything on.

    python benchmarks/monitoring.py [--rounds 15] [--strategy zero3] [--json FILE]

All three live in the same two processes and take turns; ratios are taken round by round. "nothing"
is there twice, so that its ratio to itself shows the noise.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

import torch
from measure import interleave, launch, machine, ratio, run_rank, write_json

import penstock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig  # noqa: E402

SIZES = GPTConfig(layers=6, width=480, heads=6, context=128)
FORMATS = ["jsonl", "csv", "tensorboard"]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=2, help=f"windows of {SIZES.context} bytes per rank")
    add("--strategy", default="zero3")
    add("--rounds", type=int, default=15)
    add("--steps", type=int, default=4, help="of each in a round")
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def kinds_of(folder: str) -> dict[str, dict]:
    return {
        "nothing": {"events": 0},
        "nothing again": {"events": 0},
        "the timeline": {},
        "everything": {"path": folder, "formats": FORMATS, "console": "lines", "trace_first": 5},
    }


def work(options: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    batch = torch.randint(256, (options.batch, SIZES.context + 1))
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for name, monitor in kinds_of(folder).items():
            torch.manual_seed(0)
            config = {"strategy": options.strategy, "clip": 1.0, "monitor": monitor}
            engines[name] = penstock.initialize(GPT(SIZES), config)
        engines["everything"].on_step(lambda row: None)

        def step(engine: penstock.Engine) -> None:
            engine.backward(engine(batch[:, :-1], batch[:, 1:]))
            engine.step()

        actions = {name: lambda engine=engine: step(engine) for name, engine in engines.items()}
        for action in actions.values():
            for _ in range(3):
                action()
        seconds = interleave(actions, options.rounds, options.steps)
        for engine in engines.values():
            engine.close()
    return seconds


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank(work, options)
        return
    print(machine())
    seconds = launch(__file__, [*sys.argv[1:], "--worker"], options.ranks)
    print(f"{'':<16}{'ms/step':>9}{'/ nothing':>11}{'quartiles':>16}")
    for name, each in seconds.items():
        middle, low, high = ratio(each, seconds["nothing"])
        median = sorted(each)[len(each) // 2]
        print(f"{name:<16}{1e3 * median:>9.1f}{middle:>11.4f}   {low:.4f}-{high:.4f}")
    write_json(options.json, {"machine": machine(), "seconds": seconds})


if __name__ == "__main__":
    main()
