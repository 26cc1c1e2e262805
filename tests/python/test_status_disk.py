"""penstock status and top of a rank that waits for its disk."""

from __future__ import annotations

import dataclasses
import os

import pytest

from penstock.cli import live_status


@dataclasses.dataclass
class Line:
    step: int
    age_s: float
    text: str


@dataclasses.dataclass
class Lane:
    name: str
    waits: bool
    peer: int
    sequence: int
    line: Line


@dataclasses.dataclass
class Board:
    rank: int
    lanes: list[Lane]
    at: Line = dataclasses.field(default_factory=lambda: Line(7, 90.0, "forward u2 (h.1)"))
    log: tuple[Line, ...] = ()
    size: int = 2
    roster: tuple[str, ...] = ("here 1", "here 2")
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


def on_disk(waits=True):
    return Lane("disk", waits, -1, 3, Line(0, 12.0, "read of 4096 bytes of the swap file"))


def gather(peer):
    return Lane("gather", True, peer, 5, Line(7, 11.0, "move u3 param"))


PLACES = {
    "on disk": (
        [on_disk()],
        "waits for the disk (read of 4096 bytes of the swap file), at `forward u2 (h.1)`",
        12.0,
        False,
    ),
    "no longer": ([on_disk(waits=False)], "at `forward u2 (h.1)`", 90.0, False),
    "a lane waits for a peer": (
        [on_disk(), gather(1)],
        "waits for rank 1 in `move u3 param` (lane gather), at `forward u2 (h.1)`",
        11.0,
        True,
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_place(case):
    lanes, what, for_s, waits = PLACES[case]
    place = live_status.places([(os.getpid(), Board(0, lanes))])[0]
    assert (place.what, place.for_s, place.waits) == (what, for_s, waits)


def test_a_rank_on_disk_is_late():
    """It waits for no rank, so it is the one that the others wait for."""
    found = [(1, Board(0, [on_disk()])), (2, Board(1, [gather(0)]))]
    assert live_status.verdict(found) == "late: rank 0"
    both = [(1, Board(0, [on_disk()])), (2, Board(1, [on_disk()]))]
    assert live_status.verdict(both) == "no rank waits for a rank that is behind"
