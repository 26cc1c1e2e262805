"""The first steps on a device: their losses, their times, and the memory of a process.

    python benchmarks/gpu_first.py [--device cuda] [--budget-s 120] [--json FILE]

Plain torch and Penstock (ddp, zero3, state on the host) take three steps of a small GPT, each in a
process of its own, so that one that fails takes no other along. Losses must agree with those of
plain torch. "Used" is what the device has in use with that process, its context included, and
"contexts" on how many devices the process has memory (it should be one).
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import accelerator
import gpu_runs
import gpu_trainers
import watched
from accelerator import MIB, Deadline
from gpu_runs import SIZES, gap
from measure import read_json, write_json

TRAINERS = ("torch bf16", "ours device", "ours zero3", "ours host optimizer", "ours all on host")
STEPS = 3
GAP = 0.01  # relative, of losses in bf16
LEAST_S = 15.0  # of a process
UNFINISHED = 3  # exit code: what is left would be done with more time


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help='"cuda", "sim", "cpu"')
    add("--size", choices=SIZES, help="default: 125m; tiny on a device that is not real")
    add("--budget-s", type=float, default=120.0)
    add("--trainers", nargs="+", default=TRAINERS, choices=[*gpu_trainers.BYTES])
    add("--json", help="file for all figures; it also keeps those of an earlier call")
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    real = options.device not in ("cpu", "sim")
    options.size = options.size or ("125m" if real else "tiny")
    return options


def worker(options: argparse.Namespace) -> None:
    """Three steps of one trainer; the result is written after each."""
    device = accelerator.open_device(options.device)
    accelerator.join_alone(device)
    size = SIZES[options.size]
    begin = time.perf_counter()
    run = gpu_runs.Run(options.trainers[0], size, gpu_runs.settings_of(device, size))
    accelerator.synchronize(device)
    result: dict[str, Any] = {"setup_s": time.perf_counter() - begin, "step_s": []}
    for _ in range(STEPS):
        begin = time.perf_counter()
        run.step()
        run.finish()
        accelerator.synchronize(device)
        result["step_s"].append(time.perf_counter() - begin)
        result["losses"] = run.losses()
        result["device_bytes"] = accelerator.peak_bytes(device)
        result["used_bytes"] = accelerator.used_bytes(device)
        result["contexts"] = accelerator.contexts(device)
        write_json(options.result, result)
    os._exit(0)  # no closing: it would gather what rests elsewhere


def show(name: str, one: dict[str, Any], reference: list[float]) -> None:
    if one.get("error"):
        print(f"{name:<21} FAILED: {watched.last_line(one['error'])}")
        return
    steps = "".join(f"{1000 * seconds:>11.1f}" for seconds in one["step_s"])
    losses = "".join(f"{loss:>9.4f}" for loss in one["losses"])
    print(
        f"{name:<21}{one['setup_s']:>8.1f}{steps}{losses}{gap(one['losses'], reference):>9.1e}"
        f"{one['device_bytes'] / MIB:>10.0f}{one['used_bytes'] / MIB:>8.0f}{one['contexts']:>10}"
    )


def main() -> None:
    options = parse_options()
    if options.result:
        worker(options)
        return
    deadline = Deadline(options.budget_s)
    whole: dict[str, Any] = {"size": options.size, "by_trainer": {}}
    steps = "".join(f"{f'step {i + 1} ms':>11}" for i in range(STEPS))
    losses = "".join(f"{f'loss {i + 1}':>9}" for i in range(STEPS))
    print(f"{'trainer':<21}{'setup s':>8}{steps}{losses}{'gap':>9}", end="")
    print(f"{'peak MiB':>10}{'used':>8}{'contexts':>10}", flush=True)
    found = read_json(options.json).get("by_trainer", {})
    earlier = {name: one for name, one in found.items() if not one.get("error")}
    bad, left = [], []
    reference: list[float] = []
    for name in options.trainers:
        one = earlier.get(name, {})
        if not one and deadline.left_s() < LEAST_S:
            left.append(name)
            continue
        if not one:
            command = [__file__, "--device", options.device, "--size", options.size]
            one = watched.run([*command, "--trainers", name], min(60.0, deadline.left_s()))
        whole["by_trainer"][name] = one
        reference = reference or one.get("losses", [])
        show(name, one, reference)
        if one.get("error") or gap(one["losses"], reference) > GAP:
            bad.append(name)
        write_json(options.json, whole)
    if bad:
        raise SystemExit(f"failed, or losses more than {GAP:g} apart: {', '.join(bad)}")
    if left:
        print(f"no time was left for: {', '.join(left)}")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
