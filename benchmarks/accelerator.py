"""An accelerator for the benchmarks gpu_*.py: opening it, and the limits that the same run measures
(its bf16 matrix products, the link to pinned host memory, the host's Adam)."""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cpu_adam
import measure
import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).parents[1]
MIB = 2**20
REPEATS = 5


class Deadline:
    """Seconds that a benchmark may take, from when it was made."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end - time.monotonic()


def open_device(name: str) -> torch.device:
    """Of "cuda", "sim" (tests/device) or "cpu"; it is the current one from then on."""
    if name.startswith("sim"):
        sys.path.insert(0, str(ROOT / "tests" / "device"))
        import sim  # noqa: PLC0415 - is not where others look for modules

        sim.start()
        torch.__future__.set_swap_module_params_on_conversion(True)
    device = torch.device(name)
    if device.type == "cpu":
        return device
    device = torch.device(device.type, device.index or 0)
    torch.accelerator.set_device_index(device.index)
    return device


def is_real(device: torch.device) -> bool:
    """Whether speed on it means something, so that sizes should be those of an accelerator."""
    return device.type not in ("cpu", "sim")


def count(device: torch.device) -> int:
    """How many devices there are; of simulated ones, as many as are worth a process each."""
    return 2 if device.type == "sim" else torch.accelerator.device_count()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _back_ends(device: torch.device) -> str:
    known = {"cpu": "gloo", "sim": "cpu:gloo,sim:simccl", "cuda": "cpu:gloo,cuda:nccl"}
    return known.get(device.type, f"cpu:gloo,{device.type}:xccl")


def join_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, which FSDP2 needs."""
    dist.init_process_group(_back_ends(device), store=dist.HashStore(), rank=0, world_size=1)


def join(device: torch.device) -> None:
    """Joins the process group of the launcher; all ranks call it."""
    dist.init_process_group(_back_ends(device))


def meet(device: torch.device) -> None:
    """Waits for the device and, if there are several ranks, for theirs."""
    synchronize(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))  # over gloo: nothing is queued on the device


def over_ranks(values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
    """Returns the values reduced over all ranks, which all call it."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, how)
    return found.tolist()


def described(device: torch.device) -> dict[str, Any]:
    """The machine, and what the device says of itself."""
    found = measure.machine() | {"device": str(device), "name": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "cuda": torch.version.cuda}
    return found


# ---- memory


def allocated_bytes(device: torch.device) -> int:
    """By torch's allocator, which the engine's memory on the device comes from too."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    if is_real(device):
        torch.accelerator.reset_peak_memory_stats(device)


def free_bytes(device: torch.device) -> int:
    """On the device; of one that is not real, what the host has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def used_bytes(device: torch.device) -> int:
    """What all processes use of a CUDA device, contexts included; 0 on other devices."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def contexts(device: torch.device) -> int:
    """On how many devices this process has memory; 0 if that is unknown."""
    if device.type == "sim":
        return len(sys.modules["sim"].contexts())
    if device.type != "cuda":
        return 0
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return done.stdout.split().count(str(os.getpid()))


def forget_unused(device: torch.device) -> None:
    """What torch's allocator keeps for later goes back to the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def available_bytes() -> int:
    """Host memory that could be had without swapping, of the system or the control group."""
    lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":") for line in lines)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return free
    return min(free, limit - used)


# ---- time


def seconds_of(device: torch.device, action: Callable[[], None], repeats: int = REPEATS) -> float:
    """The median; the device is idle before and after."""
    action()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        action()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def matmul_flops(device: torch.device) -> float:
    """Operations per second of the best of a few sizes of bf16 matrix products on random data."""
    sizes = (4096, 8192, 12288) if is_real(device) else (256,)
    count = 10 if is_real(device) else 2
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def products(a: Any = a, b: Any = b, out: Any = out) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        best = max(best, count * 2.0 * size**3 / seconds_of(device, products))
    return best


# ---- the link to the host


def link_sizes(device: torch.device) -> Sequence[int]:
    sizes = (1, 4, 16, 64, 256) if is_real(device) else (1, 4)
    return [size * MIB for size in sizes]


def link_rates(device: torch.device, size: int, rounds: int = REPEATS) -> dict[str, float]:
    """Bytes per second between pinned memory and the device in copies of `size` bytes: "to_device",
    "to_host", and "both" (the sum of the two directions at once). On the CPU a plain copy."""
    pinned = device.type != "cpu"
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    for host in hosts:
        host.fill_(1)
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)] if pinned else []
    count = max(1, min(64, (1 << (30 if is_real(device) else 23)) // size))

    def to_device() -> None:
        for _ in range(count):
            there[0].copy_(hosts[0], non_blocking=True)

    def to_host() -> None:
        for _ in range(count):
            hosts[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        for _ in range(count):
            with streams[0]:
                there[0].copy_(hosts[0], non_blocking=True)
            with streams[1]:
                hosts[1].copy_(there[1], non_blocking=True)

    moved = count * size
    rates = {
        "to_device": moved / seconds_of(device, to_device, rounds),
        "to_host": moved / seconds_of(device, to_host, rounds),
    }
    if streams:
        rates["both"] = 2 * moved / seconds_of(device, both, rounds)
    return rates


def best_link(device: torch.device) -> dict[str, float]:
    """The best rate of each kind over a sweep of sizes, in bytes per second."""
    sweep = [link_rates(device, size) for size in link_sizes(device)]
    return {kind: max(rates[kind] for rates in sweep) for kind in sweep[0]}


# ---- the host's Adam


def host_adam(real: bool) -> dict[str, float]:
    """The engine's kernel over memory as the engine has it, bf16 gradient in and bf16 weights out,
    28 bytes per parameter, and the fastest in-place loop over the same arrays; bytes per second."""
    library = cpu_adam.load(str(ROOT / "build" / "release" / "benchmarks" / "libpenstock_bench.so"))
    memory = cpu_adam.Memory(50_000_000 if real else 4_000_000, library)
    actions = {"adam": cpu_adam.ours(memory, library)}
    for kind, name in enumerate(cpu_adam.LOOPS):
        actions[name] = cpu_adam.loop(memory, library, kind)
    threads = 2  # of two and more, samples() takes wall time
    taken = cpu_adam.samples(actions, memory.count, 3, threads)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    numel = memory.master[0].numel()
    loop = min(seconds[name] for name in cpu_adam.LOOPS)
    return {
        "adam": cpu_adam.BYTES[torch.float32] * numel / seconds["adam"],
        "memory": cpu_adam.BYTES_LOOP * numel / loop,
    }


# ---- rounds


def take_turns(
    device: torch.device,
    actions: Mapping[str, tuple[Callable[[], None], Callable[[], None]]],
    steps: int,
    may_go_on: Callable[[dict[str, list[float]]], bool],
) -> None:
    """Measures the seconds per step of every action in rounds, as long as `may_go_on`, which gets
    the seconds so far, is true.

    An action is a step and a call that waits for all that steps left under way. In its turn it
    steps once untimed, then `steps` times timed. The order turns by one from round to round. If
    there are several ranks, all call this, and `may_go_on` must be equal on all.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    count = 0
    while may_go_on(seconds):
        shift = count % len(names)
        for name in names[shift:] + names[:shift]:
            step, finish = actions[name]
            step()
            meet(device)
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            meet(device)
            seconds[name].append((time.perf_counter() - begin) / steps)
            finish()
            synchronize(device)
        count += 1
