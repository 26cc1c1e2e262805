"""Waits for child processes. A failure of one, or a signal to the launcher, ends all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from penstock.launch.messages import LOG
from penstock.launch.processes import Child, Events


@contextlib.contextmanager
def signals_to(events: Events) -> Iterator[None]:
    """Puts SIGINT, SIGTERM and SIGHUP in `events` while the context is open."""

    def forward(signum: int, _frame: FrameType | None) -> None:
        events.put(signum)

    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, forward) for signum in taken}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclasses.dataclass(frozen=True)
class Patience:
    """Time limits for the children, in seconds."""

    grace_s: float  # time to end by themselves after a child failed
    kill_s: float = 5.0  # time from SIGTERM to SIGKILL after a failure
    num_lost: int = 0  # number of children that may fail while the other children go on

    @property
    def stop_s(self) -> float:
        """The time from SIGTERM to SIGKILL after a signal to the launcher."""
        return max(self.kill_s, self.grace_s)


@dataclasses.dataclass
class Outcome:
    """How the children ended."""

    failed: Child | None = None  # the child that failed first
    stopped_by: int = 0  # the signal that the launcher received; 0 for none
    elsewhere: str = ""  # failure text of another node that failed before any child


class _Supervisor:
    def __init__(
        self, children: Sequence[Child], patience: Patience, on_failure: Callable[[Child], None]
    ):
        self.alive = set(children)
        self.end = Outcome()
        self._patience = patience
        self._on_failure = on_failure
        self._lost: list[Child] = []
        self._due: list[tuple[float, int]] = []  # (time, signal to send to the living children)

    def left_s(self) -> float | None:
        """Returns the seconds until the next signal is due; None if none is scheduled."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def signal_alive(self) -> None:
        """Sends the next scheduled signal to the living children."""
        _, signum = self._due.pop(0)
        for child in self.alive:
            child.kill(signum)

    def stop(self, signum: int) -> None:
        """Schedules SIGTERM now and SIGKILL later. A second signal kills the children now."""
        again, self.end.stopped_by = self.end.stopped_by != 0, signum
        now = time.monotonic()
        self._due = [(now if again else now + self._patience.stop_s, signal.SIGKILL)]
        if not again:
            self._due.insert(0, (now, signal.SIGTERM))

    def failed_elsewhere(self, text: str) -> None:
        """Handles a failure on another node: the children get `grace_s` to end."""
        if self.end.failed is None and not self.end.stopped_by:
            self.end.elsewhere = text
            self._give_up()

    def ended(self, child: Child) -> None:
        """Handles the end of a child. More failures than `num_lost` end the other children."""
        child.reap()
        self.alive.discard(child)
        over = self.end.failed or self.end.stopped_by or self.end.elsewhere
        if child.returncode == 0 or over:
            return
        self._lost.append(child)
        if len(self._lost) <= self._patience.num_lost and self.alive:
            LOG.warning(f"{child.failure()}; the run goes on without it")
            return
        self.end.failed = self._lost[0]
        self._on_failure(self.end.failed)
        self._give_up()
        if self.alive:
            seconds = self._patience.grace_s
            LOG.warning(f"{self.end.failed.failure()}; the others have {seconds:g} s to end")

    def _give_up(self) -> None:
        at = time.monotonic() + self._patience.grace_s
        self._due = [(at, signal.SIGTERM), (at + self._patience.kill_s, signal.SIGKILL)]


def supervise(
    children: Sequence[Child],
    events: Events,
    patience: Patience,
    on_failure: Callable[[Child], None] = lambda child: None,
) -> Outcome:
    """Waits for all children. A failure (here or on a different node) or a signal ends the other
    children."""
    run = _Supervisor(children, patience, on_failure)
    while run.alive:
        try:
            event = events.get(timeout=run.left_s())
        except queue.Empty:
            run.signal_alive()
            continue
        if isinstance(event, int):
            run.stop(event)
        elif isinstance(event, str):
            run.failed_elsewhere(event)
        else:
            run.ended(event)
    return run.end


def report(failed: Child) -> int:
    """Logs how the child failed, with the last lines of its stderr. Returns its exit code."""
    lines = [piece.decode(errors="replace").rstrip("\n") for piece in failed.tail]
    text = failed.failure() + (
        f"; the last {len(lines)} lines it wrote to stderr:" if lines else ""
    )
    LOG.error("\n".join([text, *(f"  {line}" for line in lines)]))
    return failed.exit_code


def stop_on_end_of_stdin() -> None:
    """Sends SIGTERM to this process when its stdin ends.

    The remote launcher that started this process has then closed the connection or has died.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1 << 10):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
