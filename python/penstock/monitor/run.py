"""Reads the folder of a run, even if the run was killed while it wrote."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any


@dataclasses.dataclass
class Run:
    """The contents of a run's folder.

    Attributes:
        name: the folder's name.
        about: the contents of run.json; {} if it is missing.
        rows: the rows of metrics.jsonl, one per step. If a step was trained again, the earlier rows
            from that step on are left out.
        trace: events of trace.json, or of the trace that an error left; [] if there is none.
    """

    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    trace: list[dict[str, Any]]

    def column(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) for each row with a finite value."""
        pairs = ((float(row["step"]), row.get(name)) for row in self.rows)
        return [(x, float(y)) for x, y in pairs if y is not None and math.isfinite(y)]


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, as in `Run.rows`; [] if the file is missing."""
    by_step: dict[int, dict[str, Any]] = {}
    last = 0
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the write of this line was cut short
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            if row["step"] <= last:  # the run started again or loaded an earlier checkpoint
                by_step = {step: one for step, one in by_step.items() if step < row["step"]}
            last = row["step"]
            by_step[last] = row
    return list(by_step.values())


def json_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file with one JSON object; {} if it is missing or holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trace(place: pathlib.Path, started: float) -> list[dict[str, Any]]:
    """Returns the events of the run's newest trace: trace.json or one that an error left.

    Traces that are older than the run (`started`, seconds since 1970) are ignored.
    """
    files = [place / "trace.json", *place.glob("penstock-rank*.trace.json")]
    dated = [(path.stat().st_mtime, path) for path in files if path.exists()]
    for when, path in sorted(dated, reverse=True):
        events = json_object(path).get("traceEvents")
        if when >= started and isinstance(events, list) and events:
            return events
    return []


def read(folder: str | pathlib.Path) -> Run:
    """Reads a run's folder. Raises ValueError if it has neither run.json nor metrics.jsonl."""
    place = pathlib.Path(folder)
    told, steps = json_object(place / "run.json"), rows(place / "metrics.jsonl")
    if not told and not steps:
        raise ValueError(
            f'[report] "{folder}" is not the folder of a run: it has no run.json and no '
            f'metrics.jsonl (a run with "monitor": {{"path": ...}} writes them)'
        )
    started = told.get("started")
    trace = _trace(place, started if isinstance(started, float) else 0.0)
    return Run(place.resolve().name, told, steps, trace)
