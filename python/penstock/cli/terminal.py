"""Draws on the terminal, and restores it afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from penstock.cli.top_text import Line

_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "late": "\x1b[1;31m"}
_ENTER = "\x1b[?1049h\x1b[?25l"  # switches to the alternate screen and hides the cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_UNKNOWN = os.terminal_size((80, 24))


def styled(line: Line, colours: bool) -> str:
    style = _STYLES.get(line.style, "")
    return f"{style}{line.text}\x1b[0m" if style and colours else line.text


def is_terminal() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colours() -> bool:
    """Whether lines may have colours (no-color.org)."""
    return is_terminal() and not os.environ.get("NO_COLOR")


class Screen:
    """The terminal of stdout. Reads keys from stdin if it is also a terminal. Main thread only."""

    def __init__(self) -> None:
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Sets up the terminal. Restores it on exit, on an exception, on SIGTERM and on SIGHUP.
        Ctrl-Z restores it until the process continues."""
        handlers = {
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
            signal.SIGTSTP: self._stop,
            signal.SIGINT: signal.default_int_handler,  # even if the parent ignored SIGINT
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            self._enter()
            yield
        finally:
            self._leave()
            for number, handler in before.items():
                signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        """Returns the columns and rows to draw on. Leaves out the last column, which terminals do
        not handle alike."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            found = _UNKNOWN
        return (found.columns or _UNKNOWN.columns) - 1, found.lines or _UNKNOWN.lines

    def draw(self, lines: Sequence[Line]) -> None:
        colours = has_colours()
        # Overwrites line by line, because erasing the screen first would flicker.
        text = "\r\n".join(f"{styled(line, colours)}\x1b[K" for line in lines)
        self._write(f"\x1b[H{text}\x1b[J")

    def key(self, seconds: float) -> str:
        """Waits up to `seconds` for a key. Returns the key, or "" if there was none.

        Raises EOFError if the terminal is closed.
        """
        if self._keys < 0:
            time.sleep(seconds)
            return ""
        if not select.select([self._keys], [], [], seconds)[0]:
            return ""
        try:
            read = os.read(self._keys, 64)
        except OSError:
            read = b""
        if not read:
            raise EOFError
        return read.decode("ascii", "replace")

    def _enter(self) -> None:
        if self._keys >= 0:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        if self._before:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    @staticmethod
    def _end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)  # continues here after SIGCONT
        self._enter()
