"""Trace requests: from the environment (`penstock run --trace`) or from a call of trace()."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

from penstock._native import ConfigError, RuntimeFault

# Environment variables of the ranks. `penstock run --trace` or the user sets them.
TRACE, STEPS, PROFILER = "PENSTOCK_TRACE", "PENSTOCK_TRACE_STEPS", "PENSTOCK_TRACE_PROFILER"
DEFAULT_STEPS = "10:12"


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request to trace an engine's steps `first` to `last`.

    Steps are counted from 1 for each engine, even if it loaded a checkpoint.
    """

    path: str
    first: int
    last: int
    profiler: bool = False
    asked_by: str = "trace()"


def _spelt(variable: str) -> str:
    """Returns the variable with the option of `penstock run` that sets it."""
    return f"{variable} ({variable.replace('PENSTOCK', '-').replace('_', '-').lower()})"


def of_environment(environ: Mapping[str, str]) -> Wish | None:
    """Returns the request in the variables, or None. Raises ConfigError for a wrong value."""
    path = environ.get(TRACE, "")
    if not path:
        idle = ", ".join(_spelt(name) for name in (STEPS, PROFILER) if environ.get(name))
        if idle:
            raise ConfigError(
                f"[front::trace] {idle} has no effect without a file: give {_spelt(TRACE)} too"
            )
        return None
    if path.endswith(os.sep) or pathlib.Path(path).is_dir():
        raise ConfigError(f"[front::trace] {_spelt(TRACE)} is {path}, a folder: give a file")
    text = environ.get(STEPS) or DEFAULT_STEPS
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"[front::trace] {_spelt(STEPS)} is {text}; allowed: FIRST:LAST, two step numbers of 1 "
            f"or more, such as {DEFAULT_STEPS}"
        )
    flag = environ.get(PROFILER, "")
    if flag not in ("", "0", "1"):
        raise ConfigError(f"[front::trace] {_spelt(PROFILER)} is {flag}; allowed: 0 or 1")
    return Wish(path, first, last, flag == "1", TRACE)


def check_folder(path: str) -> None:
    """Raises RuntimeFault if the trace's folder is not writable.

    Checked before training, since the trace is written only after its last step.
    """
    folder = pathlib.Path(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise RuntimeFault(
            f"[front::trace] {_spelt(TRACE)} is {path}: {folder} is missing or not writable"
        )
