"""penstock doctor: versions and facts about the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from penstock._native import _penstock
from penstock.launch import arrivals, proc

_WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _accelerators() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return f"{torch.accelerator.device_count()} x {device}" if device else "none"


def _shared_memory() -> str:
    """Returns the transport that `comm.backend` "auto" chooses for ranks of this host."""
    made, why_not = _penstock.one_host_back_end(HashStore(), 0, 1, 10.0)
    return "between ranks of this host" if made is not None else f"none, so gloo is used: {why_not}"


def report() -> int:
    """Prints the facts, one per line. Returns 0."""
    page = os.sysconf("SC_PAGE_SIZE")
    facts = {
        "penstock": importlib.metadata.version("penstock"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} (Penstock is built for {_penstock.TORCH_MINOR})",
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{_gib(page * os.sysconf('SC_AVPHYS_PAGES'))} free of "
        f"{_gib(page * os.sysconf('SC_PHYS_PAGES'))}",
        "SIMD": torch.backends.cpu.get_cpu_capability(),
        "accelerators": _accelerators(),
        "gloo": "available" if torch.distributed.is_gloo_available() else "missing in this torch",
        "shared memory": _shared_memory(),
        "environment": " ".join(f"{k}={os.environ[k]}" for k in _WORLD_VARIABLES if k in os.environ)
        or "no launcher",
    }
    for number, missing in enumerate(arrivals.sentences(proc.pids())):
        facts[f"waiting {number}" if number else "waiting"] = missing
    for name, value in facts.items():
        print(f"{name:<15}{value}")
    return 0
