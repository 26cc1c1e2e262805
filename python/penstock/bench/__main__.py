"""One rank of `penstock bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

from penstock.bench import (
    arguments,
    compute,
    engines,
    generation,
    links,
    memory,
    result,
    setting,
)
from penstock.bench.rank_group import RankGroup, Spread
from penstock.bench.setting import Setting


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        says: the text that describes it.
        share: its share of the total time.
        measure: runs it for the given seconds and returns this rank's samples by field.
    """

    says: str
    share: float
    measure: Callable[[Setting, float], dict[str, list[float]]]


PARTS = (
    Part("compute: forward and backward of a transformer block", 0.2, compute.flops),
    Part("links: all-gather and reduce-scatter of 8 MiB", 0.15, links.links),
    Part("copies between device and host", 0.1, memory.device_host),
    Part("memory: AdamW on 8.4M parameters", 0.15, engines.memory),
    Part("disk: AdamW with its state on disk", 0.2, engines.disk),
    Part("overlap: matrix products while a thread copies", 0.1, compute.overlap),
    Part("generation: products with 1 and 16 rows, attention of one token", 0.1, generation.rows),
)


def _measure(
    how: Setting, options: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Spread]:
    spreads: dict[str, Spread] = {}
    parts = [part for part in PARTS if how.ranks.world > 1 or part.measure is not links.links]
    for number, part in enumerate(parts, 1):
        say(f"[{number}/{len(parts)}] {part.says}")
        found = part.measure(how, options.seconds * part.share)
        spreads |= {field: how.ranks.spread(samples) for field, samples in found.items()}
    return spreads


def main() -> None:
    """Measures on all ranks. Rank 0 prints the result and writes it to the file."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench", description=__doc__)
    arguments.add_options(parser)
    options = parser.parse_args()
    try:
        arguments.check(options)
    except ValueError as error:
        parser.error(str(error))
    load = os.getloadavg()[0]  # read before this process adds to it
    ranks = RankGroup()
    how = setting.of(options, ranks)
    first = ranks.rank == 0
    spreads = _measure(how, options, lambda text: print(text, flush=True) if first else None)
    if first:
        told = result.about(how, options, spreads) | {"load_average": round(load, 2)}
        result.write(options.output, spreads, told)
        print(result.table(spreads))
        if load > told["cores"] / 2:
            print(
                f"other processes used this machine: before the start, the load was {load:.1f} on "
                f"{told['cores']} cores"
            )
        print(f"written: {options.output}", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
