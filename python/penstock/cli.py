"""The command line: run, status, top, inspect, report, convert, plan, bench, explain, doctor."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from penstock import (
    bench_command,
    config_file,
    convert_command,
    inspect_command,
    plan_command,
    report_command,
    status_command,
    top_command,
)
from penstock._native import _penstock
from penstock.launch import command as launch_command

_WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _explain(args: argparse.Namespace) -> int:
    text = config_file.text_of(args.config)
    if _penstock.is_deepspeed_config(text):
        native, translated = config_file.translate(text, args.world)
        for one in translated.given:
            print(f"{one.key} = {one.value}: {one.fate} ({one.note})", file=sys.stderr)
        text = json.dumps(native)
    print(_penstock.Config(text).resolved(args.world).json(indent=2))
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _accelerators() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return f"{torch.accelerator.device_count()} x {device}" if device else "none"


def _shared_memory() -> str:
    """What `comm.backend` "auto" is for ranks of this host."""
    made, why_not = _penstock.one_host_back_end(HashStore(), 0, 1, 10.0)
    return "between ranks of this host" if made is not None else f"none, so gloo: {why_not}"


def _doctor(_args: argparse.Namespace) -> int:
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
    for name, value in facts.items():
        print(f"{name:<15}{value}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Sharded training on torch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    launch_command.add_to(commands)
    plan_command.add_to(commands)
    bench_command.add_to(commands)
    status_command.add_to(commands)
    top_command.add_to(commands)
    inspect_command.add_to(commands)
    report_command.add_to(commands)
    convert_command.add_to(commands)

    explain = commands.add_parser("explain", help="print every effective value of a config")
    explain.add_argument(
        "--config", required=True, metavar="FILE", help="JSON, ours or DeepSpeed's"
    )
    explain.add_argument("--world", type=int, default=1, metavar="N", help="number of ranks")
    explain.set_defaults(command=_explain)

    doctor = commands.add_parser("doctor", help="versions and machine, for a bug report")
    doctor.set_defaults(command=_doctor)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A wrong value is one line and code 2."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
