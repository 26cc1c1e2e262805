"""Reads the status of this machine's ranks for `penstock status` and `top`.

Each rank keeps a board (src/base/board.h), an anonymous file in memory. This module reads it
through /proc/PID/fd, so it also works for a rank that hangs.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock._native import _penstock
from penstock.launch import arrivals
from penstock.launch.proc import PROC, descendants, field, pids

_LONG_S = 5.0  # longer than any wait of all ranks in a healthy run
_LINK = f"/memfd:{_penstock.STATUS_FILE}"

Found = list[tuple[int, Any]]  # process, board

# ---- processes


def began(pid: int) -> float:
    """Returns when the process started, in seconds since 1970; 0 if it has ended."""
    try:
        words = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    ticks = int(words.rpartition(")")[2].split()[19])  # since boot
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


# ---- boards


def of(pid: int) -> list[Any]:
    """Returns the boards of a process, without boards that it inherited through a fork."""
    folder = PROC / str(pid) / "fd"
    own = {str(pid), *field(pid, "NSpid")[-1:]}  # its id here, and its id in its container
    found = []
    try:
        for entry in sorted(folder.iterdir(), key=lambda entry: int(entry.name)):
            if os.readlink(entry).startswith(_LINK):
                found.append(_penstock.RankStatus.read(str(entry)))
    except (FileNotFoundError, ProcessLookupError, RuntimeError):
        pass  # the process has ended
    return [board for board in found if board is not None and str(board.pid) in own]


def readable(processes: Iterable[int]) -> Found:
    """Returns the boards of these processes, except processes of other users."""
    found: Found = []
    for pid in processes:
        try:
            found.extend((pid, board) for board in of(pid))
        except PermissionError:
            continue  # another user's process
    return found


def of_process(pid: int, command: str) -> Found:
    """Returns the boards of a rank or of a launcher's ranks, and of all other ranks of their run.

    Raises ValueError if there are none.
    """
    try:
        own = of(pid)
    except PermissionError:
        raise ValueError(f"[{command}] process {pid} belongs to another user") from None
    if not own and not field(pid, "Pid"):
        raise ValueError(f"[{command}] there is no process {pid}")
    found = [(pid, board) for board in own] or readable(descendants(pid))
    if not found:
        missing = "; ".join(arrivals.sentences(descendants(pid)))
        raise ValueError(
            f"[{command}] process {pid} and its descendants have no engine. "
            + (missing or "They do not use Penstock, or have not reached penstock.initialize()")
        )
    runs = {board.run for _, board in found if board.run}
    if runs:
        mine = {process for process, _ in found}
        others = (other for other in pids() if other not in mine)
        found += [one for one in readable(others) if one[1].run in runs]
    return found


def run_of(pid: int, board: Any) -> Any:
    """Returns a key that is equal for all ranks of a run."""
    # Before the ranks have connected, only their launcher identifies the run.
    return board.run or (*field(pid, "PPid"), board.size)


def by_run(found: Found) -> list[Found]:
    """Returns the boards of each run, in order of rank."""
    runs: dict[Any, Found] = collections.defaultdict(list)
    for pid, board in found:
        runs[run_of(pid, board)].append((pid, board))
    return [sorted(run, key=lambda one: int(one[1].rank)) for run in runs.values()]


# ---- what the boards show


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of one rank in its training step.

    Attributes:
        pid: process id on the rank's own host.
        step: the training step that the rank works on; None if its board is not on this machine.
        for_s: seconds since `what` began.
        what: a phrase that describes what the rank does.
        waits: True if the rank waits for another rank.
        numbers: metrics of the rank's last step, with the names in docs/monitoring.md, or NaN.
    """

    rank: int
    pid: str
    step: int | None
    for_s: float | None
    what: str
    waits: bool = False
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)


_DISK = "disk"  # kDiskLane of src/base/status.h


def _waits(board: Any) -> list[Any]:
    """Returns the lanes that wait for a peer."""
    return [lane for lane in board.lanes if lane.waits and lane.name != _DISK]


def _on_disk(board: Any) -> Any:
    """Returns the lane that waits for the disk, or None."""
    return next((lane for lane in board.lanes if lane.waits and lane.name == _DISK), None)


def _behind(lane: Any, peer: Any) -> bool:
    """Whether the peer has not reached the collective in which the lane waits."""
    theirs = next((other for other in peer.lanes if other.name == lane.name), None)
    if theirs is None:
        return True
    here = (lane.line.step, lane.sequence)
    at = (theirs.line.step, theirs.sequence)
    return at < here or (at == here and not theirs.line.text)  # the peer has no line yet


def late(boards: Mapping[int, Any]) -> list[int]:
    """Returns the ranks that others wait for and that do not wait themselves."""
    found = {
        lane.peer
        for board in boards.values()
        for lane in _waits(board)
        if lane.peer >= 0 and (lane.peer not in boards or _behind(lane, boards[lane.peer]))
    }
    first = [rank for rank in found if rank not in boards or not _waits(boards[rank])]
    return sorted(first or found)


def _all_wait(boards: Iterable[Any]) -> str:
    """Describes a run in which all ranks wait. In a healthy run, this may happen for a moment, in
    an exchange. Only a long wait shows that the ranks block each other."""
    seconds = min(max(float(lane.line.age_s) for lane in _waits(board)) for board in boards)
    if seconds < _LONG_S:
        return "every rank waits for another at this moment"
    return f"every rank has waited for another for {seconds:.1f} s: they may have diverged"


def verdict(found: Found) -> str:
    """Returns one sentence that names the late ranks of a run; "" for a run of one rank."""
    boards = {board.rank: board for _, board in found}
    any_board = found[0][1]
    if any_board.size == 1:
        return ""
    ranks = late(boards)
    if not ranks:
        if len(boards) > 1 and all(_waits(board) for board in boards.values()):
            return _all_wait(boards.values())
        return "no rank waits for a rank that is behind"
    names = []
    for rank in ranks:
        away = rank not in boards and rank < len(any_board.roster)
        host, _, pid = any_board.roster[rank].rpartition(" ") if away else ("", "", "")
        names.append(f"rank {rank}" + (f" (process {pid} on {host})" if away else ""))
    return "late: " + ", ".join(names)


def _place(pid: int, board: Any) -> Place:
    line, words = board.at, [f"at `{board.at.text}`"]
    waits = sorted(_waits(board), key=lambda lane: -float(lane.line.age_s))
    if waits:
        line = waits[0].line
        whom = f"rank {waits[0].peer}" if waits[0].peer >= 0 else "its peers"
        words.insert(0, f"waits for {whom} in `{line.text}` (lane {waits[0].name}),")
    disk = _on_disk(board)
    if not waits and disk is not None:
        line = disk.line
        words.insert(0, f"waits for the disk ({line.text}),")
    if not waits and board.at.text == "update" and board.log:
        words.append(f"in `{board.log[-1].text}`")
    if field(pid, "State")[:1] == ["T"]:
        words.insert(0, "stopped by a signal;")
    numbers = dict(board.numbers)
    return Place(
        board.rank, str(pid), board.at.step, line.age_s, " ".join(words), bool(waits), numbers
    )


def _missing(roster: Sequence[str], there: set[int]) -> Iterator[Place]:
    """Yields the ranks whose boards are not on this machine."""
    here = socket.gethostname()
    for rank, entry in enumerate(roster):
        if rank not in there:
            host, _, pid = entry.rpartition(" ")
            what = "gone: it ended, or closed its engine" if host == here else f"on host {host}"
            yield Place(rank, pid, None, None, what)


def places(found: Found) -> list[Place]:
    """Returns the position of every rank of one run, in order of rank."""
    made = [_place(pid, board) for pid, board in found]
    made += _missing(found[0][1].roster, {place.rank for place in made})
    return sorted(made, key=lambda place: place.rank)
