"""Seconds of a step as the simulator predicts them on a machine that `penstock bench` has measured,
beside those that a step takes: a GPT on two ranks, ddp, ZeRO-1/2/3, host and disk tiers, two tensor
ranks, and two stages of a pipeline under three schedules (four micro-batches).

    python benchmarks/predicted.py [--rounds 5] [--machine machine.json] [--json FILE]

Without --machine, `penstock bench` is run first. All engines live in the same processes and take
turns; the ratio is that of the predicted seconds to the median of the measured ones.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
from measure import interleave, launch, machine, run_rank, write_json

import penstock
from penstock.monitor import predicted, run

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig  # noqa: E402
from train_3d import GPT_RULES  # noqa: E402

CASES = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3, optimizer on host": {"strategy": "zero3", "offload": {"optimizer": "host"}},
    "zero3, optimizer on disk": {"strategy": "zero3", "offload": {"optimizer": "disk"}},
    "zero3, all on disk": {"strategy": "zero3", "offload": {"optimizer": "disk", "params": "disk"}},
    "tensor": {"strategy": "ddp", "mesh": {"tensor": 2}, "parallel": {"rules": GPT_RULES}},
}


MICRO_BATCHES = 4
for schedule in ("gpipe", "1f1b", "interleaved"):
    stages = {"schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1}
    CASES[schedule] = {"strategy": "ddp", "mesh": {"pipeline": 2}, "parallel": stages}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=8, help="windows of 128 bytes per rank")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=448)
    add("--heads", type=int, default=8)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=3, help="of each in a round")
    add("--disk", help="folder of the swap files (default: a temporary one)")
    add("--machine", help="file of penstock bench")
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(options: argparse.Namespace) -> dict[str, dict]:
    sizes = GPTConfig(layers=options.layers, width=options.width, heads=options.heads)
    torch.manual_seed(0)  # tensor ranks have the same batch
    batch = torch.randint(256, (options.batch, sizes.context + 1))
    folder = pathlib.Path(options.result).parent
    engines = {}
    for name in options.cases:
        case = CASES[name]
        torch.manual_seed(0)
        count = MICRO_BATCHES if "pipeline" in case.get("mesh", {}) else 1
        sizes_of = {"micro": options.batch // count, "accumulate": count}
        config = {**case, "clip": 1.0, "batch": sizes_of}
        config["monitor"] = {"path": str(folder / name), "machine": options.machine}
        if "disk" in name:
            config["offload"] = {**case["offload"], "path": options.disk or str(folder)}
        engines[name] = penstock.initialize(GPT(sizes), config)

    def step(engine: penstock.Engine) -> None:
        if engine.config.mesh.pipeline > 1:
            engine.train_batch((batch[:, :-1], batch[:, 1:]))
            return
        engine.backward(engine(batch[:, :-1], batch[:, 1:]))
        engine.step()

    actions = {name: lambda engine=engine: step(engine) for name, engine in engines.items()}
    for name, engine in engines.items():
        for _ in range(3):
            step(engine)
        engine.trace(folder / name / "trace.json", 3)
        for _ in range(3):
            step(engine)
    seconds = interleave(actions, options.rounds, options.steps)
    for engine in engines.values():
        engine.close()
    found = {}
    for name, each in seconds.items() if penstock.front.ranks.rank() == 0 else ():
        told = run.read(folder / name)
        worst = predicted.kinds(predicted.lines(told.trace))[0]
        found[name] = {
            "seconds": each,
            "predicted": told.about["predicted"]["step_s"],
            "worst": [worst.name, worst.predicted, worst.measured],
        }
    return found


def main() -> None:
    options = parse_options()
    if options.worker:
        run_rank(work, options)
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        arguments = sys.argv[1:]
        if options.machine is None:
            path = f"{folder}/machine.json"
            command = [sys.executable, "-m", "penstock", "bench", "--nproc", str(options.ranks)]
            command += ["--width", str(options.width), "--tokens", str(128 * options.batch)]
            subprocess.run([*command, "-o", path], check=True)
            arguments += ["--machine", path]
        found = launch(__file__, [*arguments, "--worker"], options.ranks)
    print(f"{'':<26}{'predicted':>10}{'measured':>10}{'ratio':>7}   furthest off (ms)")
    for name, one in found.items():
        median = statistics.median(one["seconds"])
        kind, expected, measured = one["worst"]
        print(
            f"{name:<26}{1e3 * one['predicted']:>10.1f}{1e3 * median:>10.1f}"
            f"{one['predicted'] / median:>7.2f}   {kind}: {expected:.1f}, {measured:.1f}"
        )
    write_json(options.json, {"machine": machine(), "cases": found})


if __name__ == "__main__":
    main()
