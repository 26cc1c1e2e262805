"""Which cores each rank of a node is bound to."""

from __future__ import annotations

import os
import pathlib

from penstock.launch.layout import Slots, format_numbers, parse_numbers

_CPU = pathlib.Path("/sys/devices/system/cpu")


def _siblings(core: int) -> set[int]:
    """The hardware threads of this one's physical core."""
    try:
        text = (_CPU / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
        return set(parse_numbers(text.strip(), "siblings"))
    except (OSError, ValueError):
        return {core}


def usable_cores() -> Slots:
    """One hardware thread of each physical core that this process may use."""
    usable: list[int] = []
    seen: set[int] = set()
    for core in sorted(os.sched_getaffinity(0)):
        if core not in seen:
            usable.append(core)
            seen |= _siblings(core)
    return tuple(usable)


def cores_of_ranks(nproc: int, core_list: str) -> list[Slots]:
    """Equal parts of the cores in their order, one for each rank; what does not divide is left out.

    Raises ValueError for cores that this process may not use, and for fewer cores than ranks.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores = usable_cores()
    if core_list:
        cores = parse_numbers(core_list, "[launch::cores] --bind-core-list")
        if not set(cores) <= set(allowed):
            raise ValueError(
                f"[launch::cores] --bind-core-list {core_list}: allowed here are "
                f"{format_numbers(allowed)}"
            )
    each = len(cores) // nproc
    if each == 0:
        raise ValueError(
            f"[launch::cores] {nproc} ranks cannot be bound to {len(cores)} cores "
            f"({format_numbers(cores)}): start fewer, or drop --bind-cores-to-rank"
        )
    return [cores[rank * each : (rank + 1) * each] for rank in range(nproc)]
