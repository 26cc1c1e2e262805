"""penstock status: where every rank of a run is, and whom it waits for.

Each rank keeps a board (src/base/board.h), an anonymous file in memory that is read through
/proc/PID/fd: the rank does nothing for it and may be stuck.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from penstock._native import _penstock

_PROC = pathlib.Path("/proc")
_LINK = f"/memfd:{_penstock.STATUS_FILE}"
_HELP = "where every rank of a run is, and which one the others wait for"


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _field(pid: int, name: str) -> list[str]:
    """Words of a line of /proc/PID/status; empty when the process is gone."""
    try:
        text = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.split() for key, _, value in lines if key == name), [])


def _boards(pid: int) -> list[Any]:
    """The boards of a process, without those that a fork left it."""
    folder = _PROC / str(pid) / "fd"
    own = {str(pid), *_field(pid, "NSpid")[-1:]}  # as it is called here, and in its container
    found = []
    try:
        for entry in sorted(folder.iterdir(), key=lambda entry: int(entry.name)):
            if os.readlink(entry).startswith(_LINK):
                found.append(_penstock.RankStatus.read(str(entry)))
    except (FileNotFoundError, ProcessLookupError, RuntimeError):
        pass  # it ended meanwhile
    return [board for board in found if board is not None and str(board.pid) in own]


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = collections.defaultdict(list)
    for other in _pids():
        for parent in _field(other, "PPid"):
            children[int(parent)].append(other)
    found: list[int] = [pid]
    for one in found:  # grows
        found.extend(children[one])
    return found


Found = list[tuple[int, Any]]  # process, board


def _readable(pids: Iterable[int]) -> Found:
    found: Found = []
    for pid in pids:
        try:
            found.extend((pid, board) for board in _boards(pid))
        except PermissionError:
            continue  # somebody else's
    return found


def _of_process(pid: int) -> Found:
    """The boards of a rank or a launcher, and of the ranks that these have met."""
    try:
        own = _boards(pid)
    except PermissionError:
        raise ValueError(f"[status] process {pid} is another user's") from None
    if not own and not _field(pid, "Pid"):
        raise ValueError(f"[status] there is no process {pid}")
    found = [(pid, board) for board in own] or _readable(_descendants(pid))
    if not found:
        raise ValueError(
            f"[status] process {pid} and those it started have no engine: they are not Penstock's, "
            f"or have not reached penstock.initialize()"
        )
    runs = {board.run for _, board in found if board.run}
    if runs:
        mine = {process for process, _ in found}
        others = (other for other in _pids() if other not in mine)
        found += [one for one in _readable(others) if one[1].run in runs]
    return found


def _waits(board: Any) -> list[Any]:
    return [lane for lane in board.lanes if lane.waits]


def _behind(lane: Any, peer: Any) -> bool:
    """Whether the peer has not come to the collective that the lane waits in."""
    theirs = next((other for other in peer.lanes if other.name == lane.name), None)
    if theirs is None:
        return True
    here = (lane.line.step, lane.sequence)
    at = (theirs.line.step, theirs.sequence)
    return at < here or (at == here and not theirs.line.text)  # its first is still to come


def _verdict(boards: dict[int, Any], roster: list[str]) -> str:
    """Who keeps the others waiting: ranks that are waited for and wait for nobody."""
    late = {
        lane.peer
        for board in boards.values()
        for lane in _waits(board)
        if lane.peer >= 0 and (lane.peer not in boards or _behind(lane, boards[lane.peer]))
    }
    if not late:
        waiting = sum(1 for board in boards.values() if _waits(board))
        if boards and waiting == len(boards) > 1:
            return "every rank waits for another: if this stays so, they have diverged"
        return "no rank waits for one that is behind"
    first = sorted(rank for rank in late if rank not in boards or not _waits(boards[rank]))
    names = []
    for rank in first or sorted(late):
        away = rank not in boards and rank < len(roster)
        names.append(f"rank {rank}" + (f" (process {_at(roster[rank])})" if away else ""))
    return "late: " + ", ".join(names)


def _at(entry: str) -> str:
    host, _, pid = entry.rpartition(" ")
    return f"{pid} on {host}"


def _row(pid: int, board: Any) -> list[str]:
    """Rank, process, step, how long, and what."""
    line, words = board.at, [f"at `{board.at.text}`"]
    waits = sorted(_waits(board), key=lambda lane: -float(lane.line.age_s))
    if waits:
        line = waits[0].line
        whom = f"rank {waits[0].peer}" if waits[0].peer >= 0 else "its peers"
        words.insert(0, f"waits for {whom} in `{line.text}` (lane {waits[0].name}),")
    if not waits and board.at.text == "update" and board.log:
        words.append(f"in `{board.log[-1].text}`")
    if _field(pid, "State")[:1] == ["T"]:
        words.insert(0, "stopped by a signal;")
    return [str(board.rank), str(pid), str(board.at.step), f"{line.age_s:.1f} s", " ".join(words)]


def _missing(board: Any, boards: dict[int, Any]) -> Iterator[list[str]]:
    """Rows of ranks that have no board here."""
    here = socket.gethostname()
    for rank, entry in enumerate(board.roster):
        if rank in boards:
            continue
        host, _, pid = entry.rpartition(" ")
        what = "gone: it ended, or closed its engine" if host == here else f"on host {host}"
        yield [str(rank), pid, "", "", what]


def _table(found: Found) -> str:
    """Of one run."""
    found = sorted(found, key=lambda one: int(one[1].rank))
    boards = {board.rank: board for _, board in found}
    any_board = found[0][1]
    rows = [_row(pid, board) for pid, board in found] + list(_missing(any_board, boards))
    rows.sort(key=lambda row: int(row[0]))
    rows.insert(0, ["rank", "pid", "step", "for", "what"])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    if any_board.size > 1:
        lines.append(_verdict(boards, any_board.roster))
    if any_board.size > 1 and not any_board.run:
        lines.append(
            f"these ranks, of {any_board.size}, have not met yet: the launcher's pid shows all here"
        )
    return "\n".join(lines)


def _log(found: Found) -> str:
    pid, board = found[0]
    lines = [f"rank {board.rank} (process {pid}), its last {len(board.log)} lines of the plan:"]
    lines += [f"step {line.step}  {line.age_s:9.3f} s ago  {line.text}" for line in board.log]
    return "\n".join(lines)


def _status(args: argparse.Namespace) -> int:
    found = _readable(_pids()) if args.pid is None else _of_process(args.pid)
    if not found:
        print("no engine of yours runs on this machine")
        return 0
    if args.log:
        print(_log(found))
        return 0
    runs: dict[Any, Found] = collections.defaultdict(list)
    for pid, board in found:
        # Ranks that have not met yet are told apart by nothing but their launcher.
        runs[board.run or (*_field(pid, "PPid"), board.size)].append((pid, board))
    print("\n\n".join(_table(run) for run in runs.values()))
    return 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    status = commands.add_parser(
        "status",
        help=_HELP,
        description=f"{_HELP}. Reads what the ranks keep in memory, and asks none of them.",
    )
    status.add_argument(
        "pid", type=int, nargs="?", metavar="PID", help="of any rank or the launcher; default: all"
    )
    status.add_argument(
        "--log", action="store_true", help="the last lines of the plan on that rank instead"
    )
    status.set_defaults(command=_status)
