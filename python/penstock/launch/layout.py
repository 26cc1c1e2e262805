"""Which ranks run where: nodes in the order of their ranks, each with the slots it uses.

A slot is a device of the node, or just a place for a rank where there is none. Ranks are numbered
through the nodes in order, and on each node through its slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

Slots = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Node:
    """A host and the slots that are used on it, in ascending order."""

    name: str
    slots: Slots


def parse_numbers(text: str, what: str) -> Slots:
    """ "0-2,5" is (0, 1, 2, 5). Raises ValueError that names `what` for anything else."""
    numbers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{what} {text!r} is not a list like 0-3,6")
        low, high = int(first), int(last or first)
        if high < low or (numbers and low <= numbers[-1]):
            raise ValueError(f"{what} {text!r} is not in ascending order")
        numbers.extend(range(low, high + 1))
    return tuple(numbers)


def format_numbers(numbers: Iterable[int]) -> str:
    """The inverse of parse_numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)


def parse_layout(text: str) -> tuple[Slots, ...]:
    """ "0-3@0,2" is two nodes, of four ranks and of two."""
    what = "[launch::layout] --layout:"
    return tuple(parse_numbers(piece, what) for piece in text.split("@"))


def format_layout(nodes: Sequence[Slots]) -> str:
    """The inverse of parse_layout."""
    return "@".join(format_numbers(slots) for slots in nodes)
