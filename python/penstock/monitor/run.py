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
        trace: events of trace.json, or of what an error has left; [] where there is none.
    """

    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    trace: list[dict[str, Any]]

    def column(self, name: str) -> list[tuple[float, float]]:
        """(step, value) where the value is known."""
        pairs = ((float(row["step"]), row.get(name)) for row in self.rows)
        return [(x, float(y)) for x, y in pairs if y is not None and math.isfinite(y)]


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Of a metrics.jsonl, as Run has them; [] where there is none."""
    by_step: dict[int, dict[str, Any]] = {}
    last = 0
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            if row["step"] <= last:  # a run that began again, or went back
                by_step = {step: one for step, one in by_step.items() if step < row["step"]}
            last = row["step"]
            by_step[last] = row
    return list(by_step.values())


def json_object(path: pathlib.Path) -> dict[str, Any]:
    """What a file of one JSON object has; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trace(place: pathlib.Path, started: float) -> list[dict[str, Any]]:
    """The newest of trace.json and what ranks have left after an error, since the run began."""
    files = [place / "trace.json", *place.glob("penstock-rank*.trace.json")]
    dated = [(path.stat().st_mtime, path) for path in files if path.exists()]
    for when, path in sorted(dated, reverse=True):
        events = json_object(path).get("traceEvents")
        if when >= started and isinstance(events, list) and events:
            return events
    return []


def read(folder: str | pathlib.Path) -> Run:
    """Raises ValueError where the folder has no metrics of a run."""
    place = pathlib.Path(folder)
    told, steps = json_object(place / "run.json"), rows(place / "metrics.jsonl")
    if not told and not steps:
        raise ValueError(
            f'[report] "{folder}" is no folder of a run: there is no run.json and no metrics.jsonl '
            f'("monitor": {{"path": ...}} makes them)'
        )
    started = told.get("started")
    trace = _trace(place, started if isinstance(started, float) else 0.0)
    return Run(place.resolve().name, told, steps, trace)
