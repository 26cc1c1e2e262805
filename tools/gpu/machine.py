"""Describes the machine of the figures. Run as a program, it prints the part that torch knows, so
that the calling process does not itself open the device."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from typing import Any


def first_line(command: list[str]) -> str:
    """Returns the first line of a command's output; empty if there is no such program."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "") if done.returncode == 0 else ""


def _field(path: str, name: str) -> str:
    for line in pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _memory_gib(name: str) -> float:
    return round(int(_field("/proc/meminfo", name).split()[0]) / 2**20, 1)


def of_torch() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - only the program needs it

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": importlib.util.find_spec("numpy") is not None,
        "devices": [],
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gib = round(properties.total_memory / 2**30, 1)
            found["devices"].append({"name": properties.name, "memory_gib": gib})
    return found


def described(python: str, folder: pathlib.Path) -> dict[str, Any]:
    """Describes the machine; `folder` is for swap files. Raises RuntimeError without torch."""
    command = [python, str(pathlib.Path(__file__))]
    asked = subprocess.run(command, text=True, capture_output=True)
    if asked.returncode != 0:
        raise RuntimeError(f"{python} has no torch that loads: {asked.stderr[-1500:]}")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found: dict[str, Any] = json.loads(asked.stdout)
    return found | {
        "driver": first_line(query),
        "python": platform.python_version(),
        "python_headers": (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "compiler": first_line([os.environ.get("CXX", "c++"), "--version"]),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib("MemTotal"),
        "available_gib": _memory_gib("MemAvailable"),
        "disk_free_gib": round(shutil.disk_usage(folder).free / 2**30, 1),
        "locked_memory_limit": "none" if locked == resource.RLIM_INFINITY else locked,
        "root": os.geteuid() == 0,
    }


if __name__ == "__main__":
    json.dump(of_torch(), sys.stdout)
