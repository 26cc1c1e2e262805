"""penstock status: prints the position of every rank of a run, and which rank others wait for."""

from __future__ import annotations

import argparse

from penstock.cli import live_status
from penstock.cli.live_status import Found, Place
from penstock.launch import arrivals, proc


def _row(place: Place) -> list[str]:
    """Returns the cells rank, process, step, seconds and activity."""
    step = "" if place.step is None else str(place.step)
    seconds = "" if place.for_s is None else f"{place.for_s:.1f} s"
    return [str(place.rank), place.pid, step, seconds, place.what]


def _table(found: Found) -> str:
    """Returns the table of one run, with the verdict below it."""
    any_board = found[0][1]
    rows = [_row(place) for place in live_status.places(found)]
    rows.insert(0, ["rank", "pid", "step", "for", "what"])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    if any_board.size > 1:
        lines.append(live_status.verdict(found))
    if any_board.size > 1 and not any_board.run:
        lines.append(
            f"these ranks (of {any_board.size}) are not connected yet; pass the launcher's pid to "
            f"see all ranks of this machine"
        )
    return "\n".join(lines)


def _log(found: Found) -> str:
    pid, board = found[0]
    lines = [f"rank {board.rank} (process {pid}), its last {len(board.log)} lines of the plan:"]
    lines += [f"step {line.step}  {line.age_s:9.3f} s ago  {line.text}" for line in board.log]
    return "\n".join(lines)


def _status(args: argparse.Namespace) -> int:
    if args.pid is None:
        found = live_status.readable(proc.pids())
    else:
        found = live_status.of_process(args.pid, "status")
    engines = {pid for pid, _ in found}
    others = [] if args.pid is not None else [p for p in proc.pids() if p not in engines]
    missing = arrivals.sentences(others)
    if not found:
        print("\n".join(["you have no engine on this machine", *missing]))
        return 0
    if args.log:
        print(_log(found))
        return 0
    print("\n\n".join([*(_table(run) for run in live_status.by_run(found)), *missing]))
    return 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    status = commands.add_parser(
        "status",
        help=summary,
        description="Prints the position of every rank of a run, and the rank that others wait "
        "for. Reads the memory of the ranks, so it also works if they hang.",
    )
    status.add_argument(
        "pid",
        type=int,
        nargs="?",
        metavar="PID",
        help="process id of any rank or of the launcher (default: all runs)",
    )
    status.add_argument(
        "--log", action="store_true", help="print the last plan lines of that rank instead"
    )
    status.set_defaults(command=_status)
