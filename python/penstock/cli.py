"""The command line: run, status, inspect, convert, plan, explain, doctor."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

import torch
import torch.distributed

from penstock import config_file, convert_command, inspect_command, plan_command, status_command
from penstock._native import _penstock
from penstock.elastic import launch_elastic
from penstock.launch import LaunchOptions, launch

_WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _run(args: argparse.Namespace) -> int:
    options = LaunchOptions(
        command=[args.script, *args.args],
        nproc=args.nproc,
        nnodes=args.nnodes[1],
        node_rank=args.node_rank,
        rdzv_endpoint=args.rdzv_endpoint,
        grace_s=args.grace_s,
        max_restarts=args.max_restarts,
        resume=args.resume,
        min_nodes=args.nnodes[0],
    )
    several = args.nnodes[1] > 1 and (args.max_restarts > 0 or args.nnodes[0] < args.nnodes[1])
    return launch_elastic(options) if several else launch(options)


def _nodes(text: str) -> tuple[int, int]:
    """ "2" or "1:4"."""
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def _explain(args: argparse.Namespace) -> int:
    text = config_file.text_of(args.config)
    if _penstock.is_deepspeed_config(text):
        translated = _penstock.translate_deepspeed_config(text, args.world)
        for one in translated.given:
            print(f"{one.key} = {one.value}: {one.fate} ({one.note})", file=sys.stderr)
        text = translated.native
    print(_penstock.Config(text).resolved(args.world).json(indent=2))
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _accelerators() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return f"{torch.accelerator.device_count()} x {device}" if device else "none"


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
        "environment": " ".join(f"{k}={os.environ[k]}" for k in _WORLD_VARIABLES if k in os.environ)
        or "no launcher",
    }
    for name, value in facts.items():
        print(f"{name:<13}{value}")
    return 0


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("run", help="start the ranks of a script on this node")
    run.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on this node")
    run.add_argument(
        "--nnodes",
        type=_nodes,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="a range: the run goes on with the nodes that there are (needs --max-restarts)",
    )
    run.add_argument("--node-rank", type=int, default=0, metavar="I")
    run.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="of node 0")
    run.add_argument(
        "--grace-s",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds the other ranks get to end by themselves after one failed, all of them "
        "to save when the run is told to stop, and nodes to come (back)",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again after a failure, up to N times",
    )
    run.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help='what engine.load("auto") loads: the newest of "checkpoint.path" (the default), '
        "nothing, or this one",
    )
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    run.set_defaults(command=_run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Sharded training on torch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)

    plan_command.add_to(commands)
    status_command.add_to(commands)
    inspect_command.add_to(commands)
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
