"""What one training step asks of a device: kernels, copies of pageable memory, waits.

    python benchmarks/gpu_launches.py [--device cuda] [--sizes 125m 1.5b] [--json FILE]

torch.profiler records the third step of plain torch and of Penstock, each in a process of its own.
A copy of pageable memory makes the host wait; a kernel over fp64 values of a parameter's size takes
four times the memory of bf16. On the simulated device its own counters are the source.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import accelerator
import gpu_runs
import gpu_trainers
import torch
import watched
from accelerator import Deadline
from gpu_runs import SIZES
from measure import read_json, write_json
from torch.profiler import ProfilerActivity, profile

TRAINERS = ("torch bf16", "ours device", "ours host optimizer")
LEAST_S = 20.0  # of a process
UNFINISHED = 3  # exit code: what is left would be done with more time


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help='"cuda", "sim", "cpu"')
    add("--sizes", nargs="+", choices=SIZES, help="default: 125m 1.5b; tiny if it is not real")
    add("--budget-s", type=float, default=200.0)
    add("--trainers", nargs="+", default=TRAINERS, choices=[*gpu_trainers.BYTES])
    add("--json", help="file for all figures; it also keeps those of an earlier call")
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    real = options.device not in ("cpu", "sim")
    options.sizes = options.sizes or (["125m", "1.5b"] if real else ["tiny"])
    return options


# ---- one trainer


def counted(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts the events of a Chrome trace by torch.profiler."""
    found: dict[str, Any] = {"kernels": 0, "fp64_kernels": 0, "kernel_ms": 0.0, "operators": 0}
    copies: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    waits: collections.Counter[str] = collections.Counter()
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            found["kernels"] += 1
            found["fp64_kernels"] += "double" in name
            found["kernel_ms"] += event.get("dur", 0.0) / 1e3
        elif kind == "gpu_memcpy":
            copies[name][0] += 1
            copies[name][1] += int(event.get("args", {}).get("bytes", 0))
        elif kind in ("cuda_runtime", "cuda_driver", "xpu_runtime") and "Synchronize" in name:
            waits[name] += 1
        elif kind == "cpu_op":
            found["operators"] += 1
    pageable = [count for name, (count, _) in copies.items() if "Pageable" in name]
    return found | {"copies": copies, "waits": waits, "pageable_copies": sum(pageable)}


def recorded(device: torch.device, run: gpu_runs.Run) -> dict[str, Any]:
    """What the next step asks of the device."""
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    with profile(activities=activities) as profiler:
        run.step()
        accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return counted(events)


def simulated(run: gpu_runs.Run) -> dict[str, Any]:
    """The counters of the simulated device over one step; it waits for pageable copies too."""
    import sim  # noqa: PLC0415 - open_device() has made it known

    sim.reset_counters()
    run.step()
    now = sim.counters()
    copies = {way: [getattr(now, way).count, getattr(now, way).bytes] for way in ("h2d", "d2h")}
    return {"kernels": now.kernels, "copies": copies, "waits": now.host_waits_by_name}


def worker(options: argparse.Namespace) -> None:
    device = accelerator.open_device(options.device)
    accelerator.join_alone(device)
    size = SIZES[options.sizes[0]]
    run, memory = gpu_runs.started(options.trainers[0], size, gpu_runs.settings_of(device, size))
    begin = time.perf_counter()
    run.step()
    accelerator.synchronize(device)
    result: dict[str, Any] = memory | {"step_s": time.perf_counter() - begin}
    result |= recorded(device, run)
    if device.type == "sim":
        result |= simulated(run)
    write_json(options.result, result)
    os._exit(0)  # no closing: it would gather what rests elsewhere


# ---- in the one that starts them


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'size':<6}{'trainer':<21}{'ms/step':>9}{'kernels ms':>11}{'kernels':>9}", end="")
    print(f"{'fp64':>7}{'pageable':>10}{'waits':>7}  copies")
    for size, name in ((size, name) for size, ones in found.items() for name in ones):
        one = found[size][name]
        if "kernels" not in one:
            why = one.get("skipped") or f"FAILED: {watched.last_line(one['error'])}"
            print(f"{size:<6}{name:<21} {why}")
            continue
        copies = ", ".join(
            f"{count} {what.removeprefix('Memcpy ')} {moved / 1e6:.1f} MB"
            for what, (count, moved) in sorted(one["copies"].items())
        )
        print(
            f"{size:<6}{name:<21}{1000 * one['step_s']:>9.1f}{one['kernel_ms']:>11.1f}"
            f"{one['kernels']:>9}{one['fp64_kernels']:>7}{one['pageable_copies']:>10}"
            f"{sum(one['waits'].values()):>7}  {copies}"
        )


def earlier(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By size and trainer, what an earlier call counted."""
    found = read_json(options.json).get("by_size", {})
    counted = {
        size: {n: o for n, o in ones.items() if "kernels" in o} for size, ones in found.items()
    }
    return {size: counted.get(size, {}) for size in options.sizes}


def main() -> None:
    options = parse_options()
    if options.result:
        worker(options)
        return
    deadline = Deadline(options.budget_s)
    device = accelerator.open_device(options.device)
    found, left = earlier(options), []
    for size, name in itertools.product(options.sizes, options.trainers):
        if name in found[size]:
            continue
        room = gpu_runs.room(device, tempfile.gettempdir())
        if why := gpu_runs.why_not(name, SIZES[size], 1, room):
            found[size][name] = {"skipped": why}
        elif deadline.left_s() < LEAST_S:
            left.append(f"{size} {name}")
        else:
            command = [__file__, "--device", options.device, "--sizes", size, "--trainers", name]
            found[size][name] = watched.run(command, deadline.left_s())
        write_json(options.json, {"by_size": found})
    show(found)
    if any(one.get("error") for of_size in found.values() for one in of_size.values()):
        raise SystemExit(1)
    if left:
        print(f"no time was left for: {', '.join(left)}")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()
