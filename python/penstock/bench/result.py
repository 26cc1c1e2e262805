"""Writes the result of a measurement as a file and as a table."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import socket
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

import penstock
from penstock.bench.machine_file import ABOUT, FIELDS, OVERLAP
from penstock.bench.rank_group import Spread
from penstock.bench.setting import Setting

_PREFIXES = ("", "k", "M", "G", "T", "P")


def _processor() -> str:
    """Returns the processor's name from /proc/cpuinfo, else its architecture."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _device(device: torch.device) -> str:
    module = getattr(torch, device.type)
    named = hasattr(module, "get_device_name")
    return str(module.get_device_name(device)) if named else device.type


def _rounded(number: float) -> float:
    """Rounds to 4 digits: any further digits differ between runs."""
    return float(f"{number:.4g}")


def about(setting: Setting, options: Namespace, spreads: Mapping[str, Spread]) -> dict[str, Any]:
    """Returns the conditions of the measurement: machine, versions, options, date, quartiles."""
    return {
        "host": socket.gethostname(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": _device(setting.device),
        "ranks": setting.ranks.world,
        "threads": torch.get_num_threads(),
        "precision": setting.precision,
        "width": setting.width,
        "tokens": setting.tokens,
        "disk": os.path.abspath(setting.disk),
        "seconds": options.seconds,
        "torch": torch.__version__,
        "penstock": penstock.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "spread": {field: _figures(spread) for field, spread in spreads.items()},
    }


def _figures(spread: Spread) -> dict[str, float]:
    return {name: _rounded(number) for name, number in asdict(spread).items()}


def value(field: str, spread: Spread) -> float:
    """Returns the value for the file: the median, with overlap limited to 0..1."""
    number = min(1.0, max(0.0, spread.median)) if field == OVERLAP else spread.median
    return _rounded(number)


def write(path: str, spreads: Mapping[str, Spread], how: Mapping[str, Any]) -> None:
    """Writes the calibration file."""
    values = {field: value(field, spreads[field]) if field in spreads else None for field in FIELDS}
    text = json.dumps({**values, ABOUT: how}, indent=1) + "\n"
    pathlib.Path(path).write_text(text, encoding="utf-8")


def _scale(number: float) -> tuple[float, str]:
    """Returns a divisor that makes the number easy to read, and its unit prefix."""
    power = 0
    while abs(number) >= 1000.0 ** (power + 1) and power < len(_PREFIXES) - 1:
        power += 1
    return 1000.0**power, _PREFIXES[power]


def table(spreads: Mapping[str, Spread]) -> str:
    """Returns the table: a line per field with median, quartiles, number of runs and meaning."""
    lines = [f"{'':<14}{'median':>15}{'half of runs':>18}{'runs':>6}  what it is"]
    for field, meaning in FIELDS.items():
        told = meaning.removeprefix("FLOP/s of ").removeprefix("bytes/s of ")
        told = told.removeprefix("bytes/s ")
        if field not in spreads:
            lines.append(f"{field:<14}{'not measured':>15}{'':>24}  {told}")
            continue
        spread = spreads[field]
        by, letter = _scale(spread.median)
        unit = letter + {"flops": "FLOP/s", "rows_16": "FLOP/s", OVERLAP: ""}.get(field, "B/s")
        median = f"{value(field, spread) / by:.3g} {unit:<7}"
        middle = f"{spread.low / by:.3g} to {spread.high / by:.3g}"
        lines.append(f"{field:<14}{median:>15}{middle:>18}{spread.runs:>6}  {told}")
    return "\n".join(lines)
