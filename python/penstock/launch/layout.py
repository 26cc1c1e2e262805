"""The layout of a run: nodes in the order of their ranks, each with the slots that it uses.

A slot is a device of the node, or a plain number if the node has no devices; each slot has one
rank. Ranks are numbered node by node, and within a node slot by slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

Slots = tuple[int, ...]
LARGEST = 65535  # slots of a host, cores of a machine


@dataclasses.dataclass(frozen=True)
class Node:
    """A host and its used slots in ascending order."""

    name: str
    slots: Slots


def parse_number(text: str) -> int | None:
    """Returns the number that `text` spells in decimal digits; None if there is none, or it is
    above LARGEST."""
    digits = text.lstrip("0") or text[-1:]
    if not text.isdecimal() or len(digits) > len(str(LARGEST)) or int(digits) > LARGEST:
        return None
    return int(digits)


def parse_numbers(text: str, what: str) -> Slots:
    """Parses a list of numbers: "0-2,5" gives (0, 1, 2, 5).

    Raises ValueError, with `what` in its text, if the list is malformed or not ascending.
    """
    numbers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        low, high = parse_number(first), parse_number(last if dash else first)
        if low is None or high is None:
            raise ValueError(
                f"{what} {text!r} is not a list like 0-3,6 of numbers from 0 to {LARGEST}"
            )
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
    """Parses --layout: "0-3@0,2" is a node with four ranks and a node with two.

    Raises ValueError for a malformed list.
    """
    what = "[launch::layout] --layout:"
    return tuple(parse_numbers(piece, what) for piece in text.split("@"))


def format_layout(nodes: Sequence[Slots]) -> str:
    """The inverse of parse_layout."""
    return "@".join(format_numbers(slots) for slots in nodes)
