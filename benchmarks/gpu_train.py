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
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import accelerator
import gpu_trainers
import torch
from accelerator import Deadline
from measure import ratio, write_json

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

GIB = 2.0**30
BATCHES = 8
MOST_ROUNDS = 9
LEAST_S = 15.0  # of a process
OUT_OF_TIME = "no time was left"
UNFINISHED = 3  # exit code: what is left would be done with more time, and --go-on
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.92, 0.9, 0.85  # of what is free


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its step."""

    model: GPTConfig
    batch: int  # sequences
    recompute: bool
    steps: int  # timed in a row

    @property
    def tokens(self) -> int:
        return self.batch * self.model.context


SIZES = {
    "tiny": Size(GPTConfig(2, 64, 2, 64, 256), 4, False, 2),
    "125m": Size(GPTConfig(12, 768, 12, 1024, 32768), 16, False, 10),
    "1.5b": Size(GPTConfig(48, 1600, 25, 2048, 32768), 8, True, 3),
    "7b": Size(GPTConfig(32, 4096, 32, 2048, 32768), 8, True, 2),
}


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


def count(config: GPTConfig) -> tuple[int, int]:
    """Parameters, and of these the ones that a token is multiplied with."""
    with torch.device("meta"):
        model = GPT(config)
    total = sum(param.numel() for param in model.parameters())
    return total, total - model.token.weight.numel() - model.position.weight.numel()


def flops(size: Size) -> float:
    """Of a step, by the model's definition; nothing is counted twice for being recomputed."""
    config = size.model
    attention = 6.0 * config.layers * config.width * config.context
    return size.tokens * (6.0 * count(config)[1] + attention)


# ---- in a process of some trainers


class Run:
    """One trainer, the data it has yet to see and the losses it had."""

    def __init__(self, name: str, size: Size, settings: gpu_trainers.Settings):
        def build() -> GPT:
            torch.manual_seed(0)
            with torch.device(settings.device):
                return GPT(size.model)

        config = size.model
        random = torch.Generator().manual_seed(0)
        shape = (BATCHES, size.batch, config.context + 1)
        # Each token depends on the one before, so there is something to learn.
        tokens = torch.randint(4, shape, generator=random).cumsum(-1) * 7 % config.vocab
        self._tokens = tokens.to(settings.device)
        self._trainer = gpu_trainers.make(name, build, settings)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        batch = self._tokens[len(self._losses) % BATCHES]
        self._losses.append(self._trainer.step(batch[:, :-1], batch[:, 1:]).float())

    def finish(self) -> None:
        self._trainer.finish()

    def losses(self) -> list[float]:
        return torch.stack(self._losses).tolist()


def started(name: str, size: Size, settings: gpu_trainers.Settings) -> tuple[Run, dict[str, Any]]:
    """A trainer after two steps, and the memory it took for them beyond what there was: on the
    device at most, on the host in the end."""
    device = settings.device
    accelerator.synchronize(device)
    before, host = accelerator.allocated_bytes(device), accelerator.available_bytes()
    run = Run(name, size, settings)
    accelerator.reset_peak(device)
    for _ in range(2):
        run.step()
    run.finish()
    accelerator.synchronize(device)
    peak = accelerator.peak_bytes(device) - before
    return run, {"device_bytes": peak, "host_bytes": host - accelerator.available_bytes()}


class Rounds:
    """As many as fit, up to `most`, by what the longest so far took."""

    def __init__(self, deadline: Deadline, most: int):
        self._deadline, self._most, self._left_s = deadline, most, deadline.left_s()
        self._longest_s, self._count = 0.0, -1

    def may_go_on(self) -> bool:
        """Asked before each, and so after each."""
        left = self._deadline.left_s()
        self._count += 1
        if self._count > 0:
            self._longest_s = max(self._longest_s, self._left_s - left)
        self._left_s = left
        return self._count < self._most and left > 1.2 * self._longest_s


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
    settings = gpu_trainers.Settings(device, Block, size.recompute, path=options.path)
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
    on_disk = any(gpu_trainers.BYTES[name][2] > 0 for name in runs)
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


def room(options: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    return (
        DEVICE_SHARE * accelerator.free_bytes(device),
        HOST_SHARE * accelerator.available_bytes(),
        DISK_SHARE * shutil.disk_usage(options.path).free,
    )


def activation_bytes(size: Size) -> float:
    """Of one trainer at a time: saved inputs of blocks, what one block (without recomputation: all)
    saves inside, and the scores."""
    config = size.model
    of_block = 40.0 * size.tokens * config.width
    blocks = 1 if size.recompute else config.layers
    kept = 4.0 * size.tokens * config.width * config.layers
    return blocks * of_block + kept + 14.0 * size.tokens * config.vocab


def fits(
    names: list[str],
    params: int,
    beside: tuple[float, float, float],
    places: tuple[float, float, float],
) -> bool:
    """Whether these can share a process. What is on disk takes its own time, so it has its own."""
    bytes_of = [gpu_trainers.BYTES[name] for name in names]
    if any(disk > 0 for _, _, disk in bytes_of):
        return False
    used = [params * sum(column) for column in zip(*bytes_of, strict=True)]
    return all(u + b <= p for u, b, p in zip(used, beside, places, strict=True))


def groups(
    options: argparse.Namespace, size: Size, device: torch.device
) -> tuple[list[list[str]], dict[str, str]]:
    """Trainers that share a process, and why the others are left out."""
    params, places = count(size.model)[0], room(options, device)
    # What one of them takes in its turn, or beside its model while it is made.
    beside = (activation_bytes(size) + gpu_trainers.WORKING_BYTES * params, 0.0, 0.0)
    found: list[list[str]] = []
    skipped: dict[str, str] = {}
    for name in options.trainers:
        if name in gpu_trainers.NEED_DEVICE and device.type == "cpu":
            skipped[name] = "needs an accelerator"
            continue
        need = [params * each for each in gpu_trainers.BYTES[name]]
        for place, wanted, extra, there in zip(
            ("device", "host", "disk"), need, beside, places, strict=True
        ):
            if wanted + extra > there:
                which = (
                    f"{(wanted + extra) / GIB:.0f} GiB of {place} needed, {there / GIB:.0f} there"
                )
                skipped.setdefault(name, which)
        if name in skipped:
            continue
        for group in found:
            members = [*group, name]
            if fits(members, params, beside, places):
                group.append(name)
                break
        else:
            found.append([name])
    return found, skipped


def run_group(options: argparse.Namespace, names: list[str], budget_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, __file__, "--size", options.size, "--device", options.device]
        command += ["--path", options.path, "--budget-s", f"{budget_s:.0f}", "--trainers", *names]
        for name in ("batch", "steps"):
            if getattr(options, name):
                command += [f"--{name}", str(getattr(options, name))]
        process = subprocess.Popen(
            [*command, "--result", str(result)], text=True, stderr=subprocess.PIPE
        )
        try:
            _, errors = process.communicate(timeout=budget_s + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            errors += f"\nended after {budget_s + 5:.0f} s"
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if process.returncode != 0:
        found["error"] = errors[-2000:]
    return {"trainers": names} | found


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


def gap(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference over the steps that both took."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False))


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
        print(f"{name:<21} FAILED: {why.strip().splitlines()[-1] if why.strip() else ''}")
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
    path = pathlib.Path(options.json or "")
    if not (options.go_on and path.is_file()):
        return []
    found = json.loads(path.read_text(encoding="utf-8")).get("processes", [])
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
    together, skipped = groups(options, size, device)
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
