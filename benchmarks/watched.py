"""Runs a part of a benchmark in a process of its own, with a limit of time and an eye on the host's
free memory: without it, a try that takes too much would take the machine along."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import accelerator
from accelerator import Deadline

GIB = 2.0**30
LEAST_FREE = 2 * GIB  # a process that leaves the system less is ended,
LEAST_SHARE = 0.25  # or less than this part of what was free, on a machine that has little
POLL_S = 0.1
TAIL_CHARACTERS = 2000


def run(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs `python command --result FILE`. The environment adds variables that are not set.

    Returns what the process wrote to FILE, and of the run:

    "error": why it was ended, or how it failed; absent if it succeeded.
    "least_available_bytes": the least memory that the system had left.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log"
        with log.open("w", encoding="utf-8") as output:
            variables = {**(environment or {}), **os.environ}
            whole = [sys.executable, *command, "--result", str(result)]
            process = subprocess.Popen(whole, stdout=output, stderr=output, env=variables)
            try:
                why, least = _watch(process, limit_s)
            finally:
                process.kill()
                process.wait()
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        text = log.read_text(encoding="utf-8", errors="replace")
    found["least_available_bytes"] = least
    if why:
        found["error"] = f"{text[-TAIL_CHARACTERS:]}\nended for {why}"
    elif process.returncode != 0:
        found["error"] = f"{text[-TAIL_CHARACTERS:]}\nexit code {process.returncode}"
    return found


def _watch(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, int]:
    """Waits until it ends or must be ended. Returns why, or "", and the least free memory."""
    deadline, least = Deadline(limit_s), accelerator.available_bytes()
    floor = min(LEAST_FREE, LEAST_SHARE * least)
    while process.poll() is None:
        least = min(least, accelerator.available_bytes())
        if least < floor:
            return f"memory: {least / GIB:.1f} GiB were left to the system", least
        if deadline.left_s() <= 0:
            return f"time: not done in {limit_s:.0f} s", least
        time.sleep(POLL_S)
    return "", least


def last_line(error: str) -> str:
    """The line that says what happened."""
    lines = [line for line in error.splitlines() if line.strip()]
    ended = lines[-1] if lines else ""
    if ended.startswith("exit code") and len(lines) > 1:
        return f"{lines[-2].strip()} ({ended})"
    return ended
