"""Chooses the cores to which each rank of a node is bound."""

from __future__ import annotations

import os
import pathlib

from penstock.launch.layout import Slots, format_numbers, parse_numbers

_CPU = pathlib.Path("/sys/devices/system/cpu")


def _siblings(core: int) -> set[int]:
    """Returns the hardware threads of the physical core that has this thread."""
    try:
        text = (_CPU / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
        return set(parse_numbers(text.strip(), "siblings"))
    except (OSError, ValueError):
        return {core}


def usable_cores() -> Slots:
    """Returns one hardware thread of each physical core that this process may use."""
    usable: list[int] = []
    seen: set[int] = set()
    for core in sorted(os.sched_getaffinity(0)):
        if core not in seen:
            usable.append(core)
            seen |= _siblings(core)
    return tuple(usable)


def cores_of_ranks(nproc: int, core_list: str) -> list[Slots]:
    """Returns equal parts of the cores, in order, one for each rank. A remainder is not used.

    Raises ValueError if this process may not use a core in `core_list`, or if there are fewer
    cores than ranks.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores = usable_cores()
    if core_list:
        cores = parse_numbers(core_list, "[launch::cores] --bind-core-list")
        if not set(cores) <= set(allowed):
            raise ValueError(
                f"[launch::cores] --bind-core-list {core_list}: this process may use only cores "
                f"{format_numbers(allowed)}"
            )
    each = len(cores) // nproc
    if each == 0:
        raise ValueError(
            f"[launch::cores] {nproc} ranks cannot be bound to {len(cores)} cores "
            f"({format_numbers(cores)}): start fewer, or drop --bind-cores-to-rank"
        )
    return [cores[rank * each : (rank + 1) * each] for rank in range(nproc)]
