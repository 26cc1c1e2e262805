"""Compares the simulator's time for each plan line with the time in a trace."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.monitor import step_picture as slices_of

Event = dict[str, Any]
_UNITS = re.compile(r" u\d+(\+u\d+)*(\[\d+/\d+\])?")


@dataclasses.dataclass
class Line:
    """Predicted and measured time of plan lines on one rank in one step, in milliseconds.

    Attributes:
        name: the text of the plan line, or the common part of the lines of one kind.
        count: the number of these lines in a step. A line that runs for each micro-batch counts
            once.
        predicted, measured: sums over all runs of these lines in a step, as means over the trace's
            steps.
    """

    name: str
    count: int
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        return self.measured - self.predicted


def _own(slices: Sequence[Event]) -> Iterable[tuple[Event, float]]:
    """Yields each slice of one thread with its own time: its duration minus the durations of slices
    inside.

    Slices must be nested or disjoint.
    """
    stack: list[tuple[Event, list[float]]] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            done, within = stack.pop()
            yield done, done["dur"] - sum(within)
        if stack:
            stack[-1][1].append(event["dur"])
        stack.append((event, []))
    for done, within in stack:
        yield done, done["dur"] - sum(within)


def lines(trace: Sequence[Event]) -> list[Line]:
    """Returns the predicted plan lines of the trace's first rank; [] if no line has a prediction.

    The time of a unit's compute excludes its waits. The time of a lane's line excludes the time in
    which the model's thread queued it.
    """
    rank = slices_of.first_rank(trace)
    slices = [e for e in trace if e.get("ph") == "X" and e["pid"] == rank]
    steps = {e["args"]["step"] for e in slices if e["cat"] == "step"}
    model = [e for e in slices if e["tid"] == 0 and e["cat"] != "step" and "step" in e["args"]]
    lanes = [(e, e["dur"]) for e in slices if e["tid"] != 0 and e["cat"] == "line"]
    on_lane = {e["name"] for e, _ in lanes}
    own = [(e, took) for e, took in _own(model) if e["name"] not in on_lane]
    found: dict[str, Line] = {}
    for event, took in [*own, *lanes]:
        args = event.get("args", {})
        if "predicted_ms" not in args or args["step"] not in steps:
            continue
        line = found.setdefault(event["name"], Line(event["name"], 1, 0.0, 0.0))
        line.predicted += args["predicted_ms"] / len(steps)
        line.measured += took / 1e3 / len(steps)
    return list(found.values())


def kinds(found: Sequence[Line]) -> list[Line]:
    """Groups lines that differ only in their units. The largest difference comes first."""
    grouped: dict[str, list[Line]] = collections.defaultdict(list)
    for line in found:
        grouped[_UNITS.sub("", line.name.partition(" (")[0])].append(line)
    made = [
        Line(name, len(some), sum(x.predicted for x in some), sum(x.measured for x in some))
        for name, some in grouped.items()
    ]
    return sorted(made, key=lambda line: -abs(line.off))
