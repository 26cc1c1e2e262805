"""penstock top: shows every rank of a run on this machine, once a second."""

from __future__ import annotations

import argparse
import math
import pathlib
import shutil
import socket
import time
from typing import Any

from penstock.cli import live_status, terminal, top_text
from penstock.cli.live_status import Found
from penstock.cli.top_text import View
from penstock.launch import proc
from penstock.monitor import run

_EVERY_S = 1.0
_ALL_EACH = 10  # every tenth look searches all processes
_SLACK_S = 60.0  # allowance for a clock that was set during the run
_PACE_STEPS = 10  # steps needed to measure the pace
_NO_ENGINE = "you have no engine on this machine"


class _Pace:
    """Seconds per step, measured since the first look."""

    def __init__(self, step: float) -> None:
        self._step, self._at = step, time.monotonic()

    def seconds(self, step: float, last: float | None) -> float | None:
        """Returns seconds per step. Returns `last`, the last step's seconds, until enough steps are
        done."""
        done = step - self._step
        return (time.monotonic() - self._at) / done if done >= _PACE_STEPS else last


class Watch:
    """Reads the ranks of a run again at every look.

    Attributes:
        last_step, last_loss: the values of the last look that found an engine.
    """

    def __init__(self, what: str | None) -> None:
        """`what` is a process id, a folder, or None for all runs.

        Raises ValueError if it is neither a process id nor the folder of a run.
        """
        self.last_step: int | None = None
        self.last_loss: float | None = None
        self._pid = int(what) if what is not None and what.isdecimal() else None
        self._folder = pathlib.Path(what) if what is not None and self._pid is None else None
        self._about: dict[str, Any] = {}
        self._runs: set[Any] = set()
        self._processes: list[int] = []  # ids of processes that have engines
        self._count = 0  # number of engines
        self._is_launcher = False
        self._looks = 0
        self._paces: dict[Any, _Pace] = {}
        if self._folder is not None:
            self._about = run.json_object(self._folder / "run.json")
            if not self._about:
                raise ValueError(
                    f'[top] "{what}" is neither a process id nor the folder of a run: it has no '
                    f'run.json. A run with "monitor": {{"path": ...}} writes that file in its '
                    f"first step"
                )

    @property
    def name(self) -> str:
        return "" if self._folder is None else self._folder.resolve().name

    def look(self) -> list[View]:
        """Returns one view per run; empty if no engine is open now."""
        found = [one for one in live_status.readable(self._processes) if self._wanted(one)]
        if not found or len(found) < self._count or self._looks % _ALL_EACH == 0:
            found = self._search()
        self._looks += 1
        self._processes, self._count = list({pid for pid, _ in found}), len(found)
        self._runs |= {live_status.run_of(*one) for one in found}
        views = [self._view(one) for one in live_status.by_run(found)]
        if views:
            self._remember(views[0])
        return views

    def ended(self) -> bool:
        """Whether the run has ended. Call it only if the run has no open engine: a launcher that is
        alive may still start an engine."""
        state = proc.field(self._pid, "State")[:1] if self._pid is not None else []
        return not self._is_launcher or state in ([], ["Z"])

    def last_words(self) -> str:
        """Returns the sentence to end with. Raises ValueError if the run is on another machine."""
        host = self._about.get("host")
        if not self._runs and host not in (None, socket.gethostname()):
            raise ValueError(
                f"[top] {self.name}: the run has no rank on this machine. It began on host {host}. "
                f"Run penstock top there"
            )
        if self._folder is not None:
            for row in run.rows(self._folder / "metrics.jsonl")[-1:]:
                if row["step"] >= (self.last_step or 0):
                    self.last_step, self.last_loss = row["step"], row.get("loss")
        elif not self._runs:
            return _NO_ENGINE
        return top_text.last_words(self.name, self.last_step, self.last_loss)

    # ---- search

    def _search(self) -> Found:
        if self._pid is not None:
            try:
                found = live_status.of_process(
                    self._pid, "top"
                )  # a launcher may have started more ranks since the last look
                self._is_launcher |= self._pid not in {pid for pid, _ in found}
                return found
            except ValueError:
                if not self._runs:
                    raise
        return [one for one in live_status.readable(proc.pids()) if self._wanted(one)]

    def _wanted(self, one: tuple[int, Any]) -> bool:
        if self._folder is None and self._pid is None:
            return True
        if self._runs:
            return live_status.run_of(*one) in self._runs
        pid, board = one
        first = f"{self._about.get('host')} {self._about.get('pid')}"
        if list(board.roster[:1]) != [first]:
            return False
        # A later start means that another process has the same id now.
        return live_status.began(pid) <= float(self._about.get("started", math.inf)) + _SLACK_S

    # ---- view

    def _view(self, found: Found) -> View:
        (pid, board), places = found[0], live_status.places(found)
        verdict = live_status.verdict(found)
        if board.size > 1 and not board.run:
            verdict = f"{len(found)} of {board.size} ranks are here; they are not connected yet"
        started = self._about.get("started") or min(live_status.began(one) for one, _ in found)
        return View(
            name=self.name,
            ranks=board.size,
            places=places,
            late=live_status.late({one.rank: one for _, one in found}),
            verdict=verdict,
            elapsed_s=time.time() - started,
            about=self._about,
            pace_s=self._pace(live_status.run_of(pid, board), places),
        )

    def _pace(self, key: Any, places: list[live_status.Place]) -> float | None:
        step = top_text.first(places, "step")
        if step is None:
            return None
        pace = self._paces.setdefault(key, _Pace(step))
        return pace.seconds(step, top_text.first(places, "step_s"))

    def _remember(self, view: View) -> None:
        step = top_text.first(view.places, "step")
        if step is not None:
            self.last_step, self.last_loss = int(step), top_text.first(view.places, "loss")


def _once(watch: Watch) -> int:
    views = watch.look()
    if not views:
        print(watch.last_words())
        return 0
    columns = shutil.get_terminal_size((160, 24)).columns
    lines = top_text.frame(views, columns, rows=sum(len(view.places) + 7 for view in views))
    print("\n".join(terminal.styled(line, terminal.has_colours()) for line in lines))
    return 0


def _live(watch: Watch, every_s: float) -> int:
    views = watch.look()  # raises its error before the screen opens
    screen = terminal.Screen()
    try:
        with screen.open():
            while views or not watch.ended():
                columns, rows = screen.size()
                lines = top_text.frame(views, columns, rows)
                screen.draw(
                    lines or [top_text.Line("no engine is open, but the launcher still runs")]
                )
                if "q" in screen.key(every_s).lower():
                    return 0
                views = watch.look()
    except (KeyboardInterrupt, EOFError):
        return 0
    print(watch.last_words())
    return 0


def _top(args: argparse.Namespace) -> int:
    watch = Watch(args.run)
    if args.once or not terminal.is_terminal():
        return _once(watch)
    return _live(watch, args.every)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.05 to 3600")
    return value


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    top = commands.add_parser(
        "top",
        help=summary,
        description="Shows every rank of a run, live: step, speed, memory, and which rank is late. "
        "Reads the memory of the ranks, so it also works if they hang. Ends when the run ends, and "
        "on q or Ctrl-C.",
    )
    top.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="the folder that monitor.path names, or the process id of any rank or of the launcher "
        "(default: all your engines)",
    )
    top.add_argument(
        "--every",
        type=_seconds,
        default=_EVERY_S,
        metavar="S",
        help=f"seconds between updates (default {_EVERY_S:g})",
    )
    top.add_argument(
        "--once",
        action="store_true",
        help="print all ranks once and exit; the default if stdout is not a terminal",
    )
    top.set_defaults(command=_top)
