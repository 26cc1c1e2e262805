"""Interleaved timing, resident memory, and starting ranks, for the benchmarks."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# The section "aio" of DeepSpeed's config.
DEEPSPEED_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 16,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}


def interleave(
    actions: Mapping[str, Callable[[], None]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of every action in every round.

    In a round each action runs once untimed, then `steps` times timed, between barriers of all
    ranks; the order turns by one from round to round. One round before the first is not counted.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-1, rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            action = actions[name]
            action()
            barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                action()
            barrier()
            if i >= 0:
                seconds[name].append((time.perf_counter() - begin) / steps)
    return seconds


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def ratio(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile of ours / peer, round by round."""
    ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, low, high


# ---- memory (Linux)


def _status_bytes(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident_bytes() -> int:
    """What this process holds in RAM, after giving unused heap back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def reset_peak() -> None:
    """Makes the present resident memory the peak so far."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Most RAM held since reset_peak(), or since the start."""
    return _status_bytes("VmHWM")


def alone(make: Callable[[], Any], act: Callable[[Any], object], times: int = 4) -> list[int]:
    """By rank, bytes of the peak that the process had while it made `made` and called `act(made)`,
    above what it had before. All ranks call it."""
    before = resident_bytes()
    reset_peak()
    made = make()
    for _ in range(times):
        act(made)
    grown = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    grown[dist.get_rank()] = peak_bytes() - before
    dist.all_reduce(grown)
    return grown.tolist()


# ---- ranks


def rank_environment(nproc: int) -> dict[str, str]:
    """Variables for that many ranks of this machine."""
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        "OMP_WAIT_POLICY": "passive",  # spinning threads ruin the figures on shared cores
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def launch(script: str, arguments: Sequence[str], nproc: int) -> Any:
    """Runs `script arguments --result FILE` on that many ranks; returns what rank 0 put in FILE.

    Raises RuntimeError with the end of its output when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "penstock", "run", "--nproc", str(nproc), script]
        command += [*arguments, "--result", str(result)]
        environment = rank_environment(nproc) | dict(os.environ)
        done = subprocess.run(command, env=environment, text=True, stderr=subprocess.PIPE)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def init_group() -> tuple[int, int]:
    """Joins the process group of the launcher; alone without one. Returns rank and world size."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def run_rank(work: Callable[[Any], Any], options: Any) -> None:
    """A rank that `launch` started: what `work(options)` returns on rank 0 is the result."""
    init_group()
    figures = work(options)
    if dist.get_rank() == 0:
        write_json(options.result, figures)
    barrier()
    dist.destroy_process_group()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def write_json(path: str | None, figures: Any) -> None:
    if path:
        pathlib.Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | None) -> dict[str, Any]:
    """The figures of an earlier call; empty if there is no such file."""
    file = pathlib.Path(path or "")
    found: dict[str, Any] = {}
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
    return found
