"""The processes of this machine, as /proc lists them. A process may end at any time."""

from __future__ import annotations

import collections
import pathlib

PROC = pathlib.Path("/proc")


def pids() -> list[int]:
    """Returns all process ids."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def field(pid: int, name: str) -> list[str]:
    """Returns the words of one line of /proc/PID/status; empty if the process has ended."""
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.split() for key, _, value in lines if key == name), [])


def descendants(pid: int) -> list[int]:
    """Returns the process and all its descendants; the process comes first."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for other in pids():
        for parent in field(other, "PPid"):
            children[int(parent)].append(other)
    found: list[int] = [pid]
    for one in found:  # the list grows
        found.extend(children[one])
    return found
