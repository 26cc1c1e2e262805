"""Training GPTs on several devices: ZeRO-1/2/3 of Penstock beside DDP, FSDP2 and DeepSpeed.

    python benchmarks/gpu_ranks.py [--device cuda] [--ranks N] [--budget-s 240] [--json FILE]

Each rank is a process on a device of its own. Two sizes: blocks of about 64 MB and of 400 MB in
bf16, which differ in how much of a gather can be hidden. All start from the same weights, each rank
has its own tokens, and the losses (means over the ranks) of the first steps must agree. Trainers
whose memory fits together share the processes and take turns; ratios are taken round by round. The
same processes measure an all-gather of a block, the limit of the wire.
"""

from __future__ import annotations

import argparse
import os
import statistics
import traceback
from typing import Any

import accelerator
import gpu_runs
import gpu_trainers
import torch
import torch.distributed as dist
import watched
from accelerator import Deadline
from gpu_runs import GIB, GPTConfig, Run, Size, count, gap, unit_params
from measure import rank_environment, ratio, read_json, write_json

MOST_ROUNDS = 9
LEAST_S = 25.0  # of the processes of a group
FIRST, GAP = 3, 0.01  # steps whose losses must agree; relative, in bf16
OUT_OF_TIME = "no time was left"
UNFINISHED = 3  # exit code: what is left would be done with more time
REAL = {
    "64mb": Size(GPTConfig(12, 1664, 13, 1024, 32768), 8, False, 5),
    "400mb": Size(GPTConfig(4, 4096, 32, 1024, 32768), 4, False, 5),
}
SMALL = {
    "64mb": Size(GPTConfig(2, 32, 2, 16, 64), 2, False, 1),
    "400mb": Size(GPTConfig(1, 96, 2, 16, 64), 2, False, 1),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help='"cuda", "sim"')
    add("--ranks", type=int, help="default: one for each device; 2 on the simulated device")
    add("--sizes", nargs="+", default=[*REAL], choices=REAL, help="blocks in bf16")
    add("--trainers", nargs="+", default=gpu_trainers.RANKS, choices=gpu_trainers.RANKS)
    add("--budget-s", type=float, default=240.0)
    add("--rounds", type=int, default=MOST_ROUNDS)
    add("--json", help="file for all figures; it also keeps those of an earlier call")
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.table = SMALL if options.device == "sim" else REAL
    return options


# ---- on a rank


def wire_rate(device: torch.device, size: Size) -> float:
    """Bytes per second that a rank receives in an all-gather of a block; 0 with one rank."""
    world = dist.get_world_size()
    shard = torch.ones(-(-unit_params(size.model) // world), device=device, dtype=torch.bfloat16)
    whole = torch.empty(world * len(shard), device=device, dtype=torch.bfloat16)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, shard)

    gather()
    accelerator.meet(device)
    seconds = accelerator.seconds_of(device, gather)
    return 2.0 * (world - 1) * len(shard) / seconds


def all_started(options: argparse.Namespace, size: Size, device: torch.device) -> Any:
    """Trainers after two steps, the memory of each (that of the rank with the most), and errors."""
    runs: dict[str, Run] = {}
    memory: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name in options.trainers:
        error, peak = "", 0.0
        try:
            run, took = gpu_runs.started(name, size, gpu_runs.settings_of(device, size))
            peak = took["device_bytes"]
        except (RuntimeError, ValueError, NotImplementedError, AssertionError):
            error = traceback.format_exc()[-2000:]
        failed, peak = accelerator.over_ranks([bool(error), peak], dist.ReduceOp.MAX)
        if failed:
            errors[name] = error or "another rank failed"
        else:
            runs[name], memory[name] = run, peak
    return runs, memory, errors


def worker(options: argparse.Namespace) -> None:
    """Trains in turns until the budget is spent; rank 0 writes the result after every round."""
    deadline = Deadline(options.budget_s)
    device = accelerator.open_device(f"{options.device}:{os.environ['LOCAL_RANK']}")
    accelerator.join(device)
    size = options.table[options.sizes[0]]
    result: dict[str, Any] = {"wire": wire_rate(device, size)}
    runs, result["device_bytes"], result["errors"] = all_started(options, size, device)
    rounds = gpu_runs.Rounds(deadline, options.rounds)

    def may_go_on(seconds: dict[str, list[float]]) -> bool:
        losses = {name: run.losses() for name, run in runs.items()}
        if dist.get_rank() == 0:
            write_json(options.result, result | {"seconds": seconds, "losses": losses})
        return bool(accelerator.over_ranks([rounds.may_go_on()], dist.ReduceOp.MIN)[0])

    if runs:
        actions = {name: (run.step, run.finish) for name, run in runs.items()}
        accelerator.take_turns(device, actions, size.steps, may_go_on)
    elif dist.get_rank() == 0:
        write_json(options.result, result)
    accelerator.meet(device)
    os._exit(0)  # no closing: it would gather parameters


# ---- in the process that starts them


def run_group(options: argparse.Namespace, size: str, names: list[str], limit_s: float) -> Any:
    """What these trainers do on all ranks."""
    command = ["-m", "penstock", "run", "--nproc", str(options.ranks), __file__]
    command += ["--device", options.device, "--sizes", size, "--rounds", str(options.rounds)]
    command += ["--budget-s", f"{limit_s - 10.0:.0f}", "--trainers", *names]
    found = watched.run(command, limit_s, rank_environment(options.ranks))
    return {"size": size, "trainers": names} | found


def figures_of(groups: list[dict[str, Any]], size: Size, ranks: int) -> dict[str, dict[str, Any]]:
    """By trainer of one size; ratios are to the trainers of the same processes."""
    found = {}
    for group in groups:
        for name, seconds in group.get("seconds", {}).items():
            if not seconds:
                continue
            others = {n: s for n, s in group["seconds"].items() if n != name and len(seconds) > 1}
            step_s = statistics.median(seconds)
            found[name] = {
                "step_s": step_s,
                "rounds": len(seconds),
                "tokens_per_s": ranks * size.tokens / step_s,
                "device_bytes": group["device_bytes"][name],
                "losses": group["losses"][name],
                "beside": {other: ratio(seconds, theirs) for other, theirs in others.items()},
            }
    return found


def show(by_name: dict[str, dict[str, Any]], size: Size, groups: list[dict[str, Any]]) -> None:
    params, block_bytes = count(size.model)[0], 2 * unit_params(size.model)
    rates = [group["wire"] for group in groups if "wire" in group]
    wire = statistics.median(rates) if rates else 0.0
    print(
        f"\n{params / 1e9:.3f}e9 parameters, blocks of {block_bytes / 1e6:.1f} MB, {size.tokens} "
        f"tokens a rank and step; an all-gather receives {wire / 1e9:.1f} GB/s"
    )
    print(f"{'trainer':<13}{'ms/step':>9}{'tokens/s':>10}{'peak GiB':>10}{'rounds':>8}", end="")
    print(f"{'first loss':>12}{'gap':>9}  time / FSDP2, DDP, DeepSpeed")
    reference = next(iter(by_name.values()))["losses"][:FIRST] if by_name else []
    for name, one in by_name.items():
        beside = ", ".join(
            f"{median:.3f} ({low:.3f}-{high:.3f}) {other}"
            for other, (median, low, high) in one["beside"].items()
            if name in gpu_trainers.OURS and other not in gpu_trainers.OURS
        )
        one["gap"] = gap(one["losses"][:FIRST], reference)
        print(
            f"{name:<13}{1000 * one['step_s']:>9.1f}{one['tokens_per_s']:>10.0f}"
            f"{one['device_bytes'] / GIB:>10.2f}{one['rounds']:>8}{one['losses'][0]:>12.4f}"
            f"{one['gap']:>9.1e}  {beside}"
        )


def errors_of(group: dict[str, Any]) -> dict[str, str]:
    own: dict[str, str] = group.get("errors", {})
    if group.get("error"):
        own = own | {" + ".join(group["trainers"]): group["error"]}
    return own


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Groups of an earlier call that trained."""
    found = read_json(options.json).get("groups", [])
    return [one for one in found if any(one.get("seconds", {}).values())]


def train_all(options: argparse.Namespace, device: torch.device, whole: dict[str, Any]) -> None:
    """Runs the groups that an earlier call has not run."""
    deadline, todo = Deadline(options.budget_s), []
    for size in options.sizes:
        done = {n for one in whole["groups"] if one["size"] == size for n in one["seconds"]}
        missing = {name: gpu_trainers.why_missing(name, device) for name in options.trainers}
        names = [name for name, why in missing.items() if not why and name not in done]
        room = gpu_runs.room(device, ".")
        groups, skipped = gpu_runs.processes(names, options.table[size], room, options.ranks)
        whole["skipped"][size] = skipped | {name: why for name, why in missing.items() if why}
        todo += [(size, group) for group in groups]
    for index, (size, names) in enumerate(todo):
        share = deadline.left_s() / (len(todo) - index)
        if share < LEAST_S:
            whole["skipped"][size] |= dict.fromkeys(names, OUT_OF_TIME)
            continue
        whole["groups"].append(run_group(options, size, names, share))
        write_json(options.json, whole)


def main() -> None:
    options = parse_options()
    if options.result:
        worker(options)
        return
    device = accelerator.open_device(options.device)
    options.ranks = options.ranks or accelerator.count(device)
    whole: dict[str, Any] = {"machine": accelerator.described(device), "ranks": options.ranks}
    whole |= {"groups": earlier(options), "skipped": {}, "by_size": {}}
    train_all(options, device, whole)
    failed, apart = [], []
    print(f"{options.ranks} ranks on {whole['machine']['name']}")
    for size in options.sizes:
        groups = [one for one in whole["groups"] if one["size"] == size]
        by_name = figures_of(groups, options.table[size], options.ranks)
        show(by_name, options.table[size], groups)
        whole["by_size"][size] = by_name
        apart += [f"{name} {size}" for name, one in by_name.items() if one["gap"] > GAP]
        for name, why in whole["skipped"][size].items():
            print(f"{name:<13} not run: {why}")
        for name, why in {n: w for one in groups for n, w in errors_of(one).items()}.items():
            print(f"{name:<13} FAILED: {watched.last_line(why)}")
            failed.append(f"{name} {size}")
    write_json(options.json, whole)
    if apart:
        print(f"the first losses are more than {GAP:g} apart: {', '.join(apart)}")
    if failed or apart:
        raise SystemExit(1)
    late = any(why == OUT_OF_TIME for one in whole["skipped"].values() for why in one.values())
    raise SystemExit(UNFINISHED if late else 0)


if __name__ == "__main__":
    main()
