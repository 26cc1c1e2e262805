"""Runs commands with a time limit and a log file each."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TAIL_CHARACTERS = 3000
GRACE_S = 8.0  # from the first signal to the last one


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    seconds: float
    timed_out: bool
    log: pathlib.Path

    @property
    def good(self) -> bool:
        return self.code == 0 and not self.timed_out

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        return self.text()[-TAIL_CHARACTERS:]


@dataclass(frozen=True)
class Runner:
    """The folder in which commands run, and their environment."""

    folder: pathlib.Path
    logs: pathlib.Path
    environment: Mapping[str, str]

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit_s: float,
        extra: Mapping[str, str] | None = None,
    ) -> Done:
        """Runs a command; its output goes to `logs/name.log`. At the limit the command is
        interrupted, as by Ctrl-C, then killed, with all that it started, before this returns."""
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{name}.log"
        environment = {**os.environ, **self.environment, **(extra or {})}
        begin = time.monotonic()
        with path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                list(command),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                timed_out = not _ended(process, limit_s)
            finally:
                _end(process)
        return Done(process.returncode, time.monotonic() - begin, timed_out, path)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command's session, whatever is left of it."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGINT)
        _ended(process, GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
