"""Collectives of ranks of one host: the back end "penstock" beside gloo and beside plain copies.

    python benchmarks/collectives.py [--ranks 2 4] [--json FILE]

All three take turns in the same processes. Sizes are of the whole buffer: what an all-gather fills
and a reduce-scatter adds up. "copy" is what every rank would copy anyway, the part of the buffer
that is another's, from its own memory, all ranks at once. With more ranks than cores gloo's figures
suffer most.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import interleave, launch, machine, ratio, run_rank, write_json

import penstock

assert penstock.__version__  # which registers the back end

SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "32 MiB": 1 << 25, "64 MiB": 1 << 26}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = ("gloo", "penstock")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    add("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    add("--rounds", type=int, default=7)
    add("--budget-mib", type=int, default=64, help="moved per timed round and case, at most")
    add("--json", help="file for all figures")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- in the ranks


def actions_of(
    operation: str, full: torch.Tensor, groups: dict[str, dist.ProcessGroup]
) -> dict[str, Callable[[], None]]:
    """One call of that collective by each peer, and the copy."""
    world = dist.get_world_size()
    shard = torch.ones(full.numel() // world, dtype=full.dtype)
    others = full.numel() - shard.numel()
    source = torch.ones(others, dtype=full.dtype)

    def call(name: str) -> None:
        group = groups[name]
        if operation == "all_gather":
            dist.all_gather_into_tensor(full, shard, group=group)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_tensor(shard, full, group=group)
        else:
            dist.all_reduce(full, group=group)

    def copy() -> None:
        full[:others].copy_(source)

    return {name: functools.partial(call, name) for name in groups} | {"copy": copy}


def work(options: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(1)
    groups = {name: dist.new_group(backend=name) for name in PEERS}
    rows = []
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        for dtype in options.dtypes:
            for size in options.sizes:
                full = torch.zeros(SIZES[size] // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
                steps = max(1, min(50, (options.budget_mib << 20) // SIZES[size]))
                seconds = interleave(actions_of(operation, full, groups), options.rounds, steps)
                rows.append(
                    {"operation": operation, "dtype": dtype, "size": size, "seconds": seconds}
                )
    return rows


# ---- outside


def report(world: int, rows: list[dict]) -> None:
    print(f"{world} ranks: microseconds (medians); times faster than gloo, with quartiles")
    print(f"{'':32}{'gloo':>10}{'penstock':>10}{'copy':>10}{'faster':>9}   quartiles")
    for row in rows:
        seconds = row["seconds"]
        middle, low, high = ratio(seconds["gloo"], seconds["penstock"])
        times = "".join(
            f"{statistics.median(seconds[n]) * 1e6:10.0f}" for n in ("gloo", "penstock", "copy")
        )
        name = f"{row['operation']:15} {row['dtype']} {row['size']:>8}"
        print(f"{name:32}{times}{middle:9.1f}   {low:.1f}-{high:.1f}", flush=True)


def main() -> None:
    options = parse_options()
    if options.worker:
        return run_rank(work, options)
    figures: dict = {"machine": machine(), "options": vars(options), "ranks": {}}
    print(figures["machine"])
    arguments = [
        "--worker",
        *("--sizes", *options.sizes),
        *("--dtypes", *options.dtypes),
        *("--rounds", str(options.rounds)),
        *("--budget-mib", str(options.budget_mib)),
    ]
    for world in options.ranks:
        figures["ranks"][world] = rows = launch(__file__, arguments, world)
        report(world, rows)
    figures["load_at_end"] = machine()["load_average"]
    write_json(options.json, figures)
    return None


if __name__ == "__main__":
    sys.exit(main())
