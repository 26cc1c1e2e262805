"""Timelines that the environment or a call asks an engine for: the request, before any is made."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

from penstock._native import ConfigError, RuntimeFault

# In the environment of the ranks, by `penstock run --trace` or by hand.
TRACE, STEPS, PROFILER = "PENSTOCK_TRACE", "PENSTOCK_TRACE_STEPS", "PENSTOCK_TRACE_PROFILER"
DEFAULT_STEPS = "10:12"


@dataclasses.dataclass(frozen=True)
class Wish:
    """A trace of the steps that an engine makes, of which the first is 1, whatever was loaded."""

    path: str
    first: int
    last: int
    profiler: bool = False
    asked_by: str = "trace()"


def _spelt(variable: str) -> str:
    """The variable and the option of `penstock run` that sets it."""
    return f"{variable} ({variable.replace('PENSTOCK', '-').replace('_', '-').lower()})"


def of_environment(environ: Mapping[str, str]) -> Wish | None:
    """What the variables ask for; None: nothing. Raises ConfigError for a value that is wrong."""
    path = environ.get(TRACE, "")
    if not path:
        idle = ", ".join(_spelt(name) for name in (STEPS, PROFILER) if environ.get(name))
        if idle:
            raise ConfigError(
                f"[front::trace] {idle} would do nothing without a file: give {_spelt(TRACE)} too"
            )
        return None
    if path.endswith(os.sep) or pathlib.Path(path).is_dir():
        raise ConfigError(f"[front::trace] {_spelt(TRACE)} is {path}, a folder: give a file")
    text = environ.get(STEPS) or DEFAULT_STEPS
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"[front::trace] {_spelt(STEPS)} is {text}; allowed: FIRST:LAST, the numbers of two "
            f"steps from 1 on, such as {DEFAULT_STEPS}"
        )
    flag = environ.get(PROFILER, "")
    if flag not in ("", "0", "1"):
        raise ConfigError(f"[front::trace] {_spelt(PROFILER)} is {flag}; allowed: 0 or 1")
    return Wish(path, first, last, flag == "1", TRACE)


def check_folder(path: str) -> None:
    """Raises RuntimeFault where a file could not be made; after ten steps it is late to say so."""
    folder = pathlib.Path(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise RuntimeFault(
            f"[front::trace] {_spelt(TRACE)} is {path}: {folder} is not there or cannot be written"
        )
