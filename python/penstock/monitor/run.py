"""A run's folder, read: also of a run that was killed while it wrote."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any


@dataclasses.dataclass
class Run:
    """What a folder has.

    Attributes:
        name: the folder's.
        about: run.json; {} where there is none.
        rows: of metrics.jsonl, one a step. Where a step was trained again, what had come after it
            is left out.
        trace: events of trace.json; [] where there is none.
    """

    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    trace: list[dict[str, Any]]

    def column(self, name: str) -> list[tuple[float, float]]:
        """(step, value) where the value is known."""
        pairs = ((float(row["step"]), row.get(name)) for row in self.rows)
        return [(x, float(y)) for x, y in pairs if y is not None and math.isfinite(y)]


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short
        if isinstance(row, dict) and "step" in row:
            if row["step"] <= max(by_step, default=0):  # a run that began again, or went back
                by_step = {step: one for step, one in by_step.items() if step < row["step"]}
            by_step[row["step"]] = row
    return list(by_step.values())


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read(folder: str | pathlib.Path) -> Run:
    """Raises ValueError where the folder has no metrics of a run."""
    place = pathlib.Path(folder)
    about, rows = _json(place / "run.json"), _rows(place / "metrics.jsonl")
    if not about and not rows:
        raise ValueError(
            f'[report] "{folder}" is no folder of a run: there is no run.json and no metrics.jsonl '
            f'("monitor": {{"path": ...}} makes them)'
        )
    trace = _json(place / "trace.json").get("traceEvents", [])
    return Run(place.resolve().name, about, rows, trace)
