"""penstock bench: measures the speeds of this machine for the simulator."""

from __future__ import annotations

import argparse

from penstock.bench import arguments
from penstock.launch import LaunchOptions, RankOptions, launch


def _bench(args: argparse.Namespace) -> int:
    arguments.check(args)
    command = ["penstock.bench", *arguments.words(args)]
    return launch(LaunchOptions(command, nproc=args.nproc, rank=RankOptions(module=True)))


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    bench = commands.add_parser(
        "bench",
        help=summary,
        description="Measures compute, links, memory and disk on all ranks at the same time, and "
        "writes the medians as JSON. It uses an accelerator if there is one, else the CPU. It "
        "takes about half a minute. Other programs on the machine change the figures.",
        epilog="example: penstock bench --nproc 2 -o machine.json && penstock plan --machine "
        "machine.json --params 1e8 --world 2. On several nodes: penstock run --nnodes ... --module "
        "penstock.bench, with the same options except --nproc.",
    )
    bench.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="number of ranks (default 1)"
    )
    arguments.add_options(bench)
    bench.set_defaults(command=_bench)
