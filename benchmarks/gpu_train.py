"""Training GPTs on one device: Penstock's tiers beside plain torch and FSDP2.

    python benchmarks/gpu_train.py --size 1.5b [--device cuda] [--budget-s 120] [--json FILE]

All start from the same weights, see the same tokens and clip at 1.0. Trainers whose memory fits
together share a process and take turns; the others have a process of their own. Every process
measures for itself: the device's bf16 matrix products, the link to pinned memory, the host's Adam.

MFU is the model's operations (6 per parameter of a matrix and token, and half of the attention's as
it is causal; nothing for what is recomputed) over what the matrix products reach. The offloaded
optimizer's exposed time is step(host optimizer) - step(device).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import traceback
from typing import Any

import accelerator
import gpu_runs
import gpu_trainers
import torch
import watched
from accelerator import Deadline
from gpu_runs import GIB, SIZES, Rounds, Run, Size, count, flops, gap, started
from measure import ratio, read_json, write_json

MOST_ROUNDS = 9
LEAST_S = 15.0  # of a process
OUT_OF_TIME = "no time was left"
UNFINISHED = 3  # exit code: what is left would be done with more time, and --go-on


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", default="tiny", choices=SIZES)
    add("--device", default="cuda", help='"cuda", "sim", "cpu"')
    add("--budget-s", type=float, default=300.0)
    add("--trainers", nargs="+", default=gpu_trainers.NAMES, choices=gpu_trainers.NAMES)
    add("--batch", type=int, help="sequences per step")
    add("--steps", type=int, help="timed in a row")
    add("--path", default=tempfile.gettempdir(), help="folder of swap files")
    add("--json", help="file for all figures")
    add("--go-on", action="store_true", help="keep the figures that the JSON file has already")
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def size_of(options: argparse.Namespace) -> Size:
    changes = {
        name: getattr(options, name) for name in ("batch", "steps") if getattr(options, name)
    }
    return dataclasses.replace(SIZES[options.size], **changes)


# ---- in a process of some trainers


def limits(device: torch.device) -> dict[str, Any]:
    return {
        "matmul_flops": accelerator.matmul_flops(device),
        "link": accelerator.best_link(device),
        "host": accelerator.host_adam(accelerator.is_real(device)),
    }


def worker(options: argparse.Namespace) -> None:
    """Trains in turns until the budget is spent; the result file is written after every round."""
    deadline = Deadline(options.budget_s)
    device = accelerator.open_device(options.device)
    accelerator.join_alone(device)
    size = size_of(options)
    settings = gpu_runs.settings_of(device, size, options.path)
    found = limits(device)
    accelerator.forget_unused(device)
    result: dict[str, Any] = {"limits": found, "memory": {}, "errors": {}, "seconds": {}}
    runs: dict[str, Run] = {}
    for name in options.trainers:
        try:
            runs[name], result["memory"][name] = started(name, size, settings)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError):
            result["errors"][name] = traceback.format_exc()[-2000:]
        write_json(options.result, result)
    on_disk = any(gpu_trainers.BYTES[name].disk > 0 for name in runs)
    rounds = Rounds(deadline, 3 if on_disk else MOST_ROUNDS)

    def may_go_on(seconds: dict[str, list[float]]) -> bool:
        result["seconds"] = seconds
        result["losses"] = {name: run.losses() for name, run in runs.items()}
        write_json(options.result, result)
        return rounds.may_go_on()

    if runs:
        actions = {name: (run.step, run.finish) for name, run in runs.items()}
        steps = min(2, size.steps) if on_disk else size.steps
        accelerator.take_turns(device, actions, steps, may_go_on)
    os._exit(0)  # no closing: it would gather what rests elsewhere


# ---- in the one that starts them


def run_group(options: argparse.Namespace, names: list[str], budget_s: float) -> dict[str, Any]:
    command = [__file__, "--size", options.size, "--device", options.device]
    command += ["--path", options.path, "--budget-s", f"{budget_s:.0f}", "--trainers", *names]
    for name in ("batch", "steps"):
        if getattr(options, name):
            command += [f"--{name}", str(getattr(options, name))]
    return {"trainers": names} | watched.run(command, budget_s + 5.0)


def figures_of(group: dict[str, Any], size: Size) -> dict[str, dict[str, Any]]:
    """By trainer, of those that took part in a round."""
    found = {}
    for name, seconds in group.get("seconds", {}).items():
        if not seconds:
            continue
        median = statistics.median(seconds)
        found[name] = {
            "step_s": median,
            "rounds": len(seconds),
            "tokens_per_s": size.tokens / median,
            "mfu": flops(size) / median / group["limits"]["matmul_flops"],
            **group["memory"][name],
            "losses": group["losses"][name],
            "beside": {
                other: ratio(seconds, theirs)[0]
                for other, theirs in group["seconds"].items()
                if len(theirs) == len(seconds) and len(seconds) > 1 and other != name
            },
        }
    return found


def exposed(by_name: dict[str, Any], all_limits: dict[str, Any], params: int) -> dict[str, float]:
    """What shows of the host's optimizer, and what would if it worked beside all the rest:
    gradients down and weights up the link, two bytes each, both at once; Adam at 28 bytes."""
    host, device = by_name.get("ours host optimizer"), by_name.get("ours device")
    link = all_limits["link"]
    found = {
        "adam_s": 28.0 * params / all_limits["host"]["adam"],
        "adam_at_memory_rate_s": 28.0 * params / all_limits["host"]["memory"],
        "link_s": 2.0 * params / min(link["to_device"], link["to_host"]),
    }
    if host and device:
        found["exposed_s"] = host["step_s"] - device["step_s"]
        found["bound_s"] = max(0.0, max(found["adam_s"], found["link_s"]) - device["step_s"])
        ideal = max(found["adam_s"], found["link_s"], device["step_s"])
        found["host_step_over_bound"] = host["step_s"] / ideal
    return found


def report(by_name: dict[str, Any], size: Size, whole: dict[str, Any]) -> None:
    first = next(iter(by_name), "")
    total, _ = count(size.model)
    recompute = "recomputed" if size.recompute else "kept"
    print(f"\n{total / 1e9:.3f}e9 parameters, {size.tokens} tokens a step, activations {recompute}")
    print(
        f"{'trainer':<21}{'ms/step':>9}{'tokens/s':>10}{'MFU':>7}{'device GiB':>12}{'host GiB':>10}"
        f"{'rounds':>8}{'last loss':>11}{'gap':>9}{'/ first of its process':>24}"
    )
    for name, one in by_name.items():
        leader = next((n for n in whole["leaders"] if n in one["beside"]), "")
        beside = f"{one['beside'][leader]:.3f} {leader}" if leader else ""
        print(
            f"{name:<21}{1000 * one['step_s']:>9.1f}{one['tokens_per_s']:>10.0f}{one['mfu']:>7.3f}"
            f"{one['device_bytes'] / GIB:>12.2f}{one['host_bytes'] / GIB:>10.2f}{one['rounds']:>8}"
            f"{one['losses'][-1]:>11.4f}{gap(one['losses'], by_name[first]['losses']):>9.1e}"
            f"  {beside}"
        )
    for name, why in whole["skipped"].items():
        print(f"{name:<21} not run: {why}")
    for name, why in whole["errors"].items():
        print(f"{name:<21} FAILED: {watched.last_line(why)}")
    if "offload" in whole:
        times = ", ".join(f"{key} {value:.4f}" for key, value in whole["offload"].items())
        print(f"offloaded optimizer: {times}")


def summarized(found: list[dict[str, Any]], size: Size, whole: dict[str, Any]) -> dict[str, Any]:
    """Adds to `whole` what the processes did; the figures by trainer."""
    by_name: dict[str, Any] = {}
    whole["errors"], whole["leaders"] = {}, [group["trainers"][0] for group in found]
    for group in found:
        by_name |= figures_of(group, size)
        whole["errors"] |= group.get("errors", {})
        if "error" in group:
            whole["errors"][" + ".join(group["trainers"])] = group["error"]
        if "limits" in group:
            whole["limits"] = group["limits"]
    if by_name and "limits" in whole:
        whole["offload"] = exposed(by_name, whole["limits"], count(size.model)[0])
    whole["by_trainer"] = by_name
    return by_name


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What processes of an earlier call found, of trainers that got through."""
    found = read_json(options.json if options.go_on else None).get("processes", [])
    return [group for group in found if any(group.get("seconds", {}).values())]


def main() -> None:
    options = parse_options()
    if options.result:
        worker(options)
        return
    deadline = Deadline(options.budget_s)
    size = size_of(options)
    device = accelerator.open_device(options.device)
    found = earlier(options)
    there = {name for group in found for name in figures_of(group, size)}
    options.trainers = [name for name in options.trainers if name not in there]
    missing = {name: gpu_trainers.why_missing(name, device) for name in options.trainers}
    names = [name for name, why in missing.items() if not why]
    together, skipped = gpu_runs.processes(names, size, gpu_runs.room(device, options.path))
    skipped |= {name: why for name, why in missing.items() if why}
    whole: dict[str, Any] = {"machine": accelerator.described(device), "skipped": skipped}
    whole |= {"size": dataclasses.asdict(size), "parameters": count(size.model)[0]}
    for index, names in enumerate(together):
        share = deadline.left_s() / (len(together) - index)
        if share < LEAST_S:
            skipped |= {name: OUT_OF_TIME for name in names}
            continue
        found.append(run_group(options, names, share - 5.0))
        summarized(found, size, whole)
        write_json(options.json, whole | {"processes": found})
    by_name = summarized(found, size, whole)
    report(by_name, size, whole)
    write_json(options.json, whole | {"processes": found})
    if not by_name:
        raise SystemExit("no trainer got through")
    raise SystemExit(UNFINISHED if OUT_OF_TIME in skipped.values() else 0)


if __name__ == "__main__":
    main()
