"""Adds the events of torch's profiler to a rank's timeline.

[Note: The profiler's clock] The timeline uses CLOCK_MONOTONIC. The profiler uses its own clock,
derived from the processor's. A mark is a profiler event with readings of CLOCK_MONOTONIC right
before and right after each of its ends. So each end bounds the difference of the clocks from both
sides. One mark is taken before the first step, and one after the last step. Events between the
marks are shifted by the linear interpolation of the two differences.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import json
import os
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from penstock._native import ConfigError
from penstock.front import ranks

MOST_EVENTS = 200_000  # per rank in one file
FIRST_ROW = 1000  # larger than the row number of any lane
_TRIES = 5  # readings per mark; the narrowest one is used
_APART_NS = 1_000_000  # a larger drift between the two marks gives a warning
_LONGEST_NAME = 256  # kernel names contain C++ types and can be very long
_MARK = "penstock clock"


@dataclasses.dataclass(frozen=True)
class Seen:
    """A profiler event. Times are in nanoseconds of the profiler's clock."""

    name: str
    kind: str  # torch's name for it: "cpu_op", "kernel"
    row: tuple[str, int, int]  # ("thread" or "stream", device (-1: host), number)
    begin_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class Reading:
    """CLOCK_MONOTONIC before, inside and after the profiler event with this name."""

    name: str
    before_ns: int
    within_ns: int
    after_ns: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The profiler's clock at `at_ns` was ahead of CLOCK_MONOTONIC by `ahead_ns` +- `doubt_ns`."""

    at_ns: int
    ahead_ns: int
    doubt_ns: int


def read_mark(number: int) -> list[Reading]:
    """Adds a mark to the profiler's events and returns its clock readings."""
    readings = []
    for index in range(_TRIES):
        name = f"{_MARK} {number}.{index}"
        before = time.monotonic_ns()
        with record_function(name):
            within = time.monotonic_ns()
        readings.append(Reading(name, before, within, time.monotonic_ns()))
    return readings


def difference(readings: Iterable[Reading], events: dict[str, Seen]) -> Difference:
    """Returns the clock difference from the narrowest reading.

    Raises LookupError if the profiler has none of the readings' events.
    """
    found = []
    for one in readings:
        if one.name not in events:
            continue
        begin, end = events[one.name].begin_ns, events[one.name].end_ns
        low = max(begin - one.within_ns, end - one.after_ns)
        high = min(begin - one.before_ns, end - one.within_ns)
        doubt = abs(high - low) // 2
        found.append(Difference(begin, (low + high) // 2, doubt))
    if not found:
        raise LookupError("the profiler did not record the clock marks")
    return min(found, key=lambda one: one.doubt_ns)


class Clock:
    """Converts the profiler's time to CLOCK_MONOTONIC with the first and the last mark."""

    def __init__(self, first: Difference, last: Difference) -> None:
        self._first, self._last = first, last

    @property
    def apart_ns(self) -> int:
        """The drift between the two marks that exceeds their uncertainty, in nanoseconds."""
        apart = abs(self._last.ahead_ns - self._first.ahead_ns)
        return max(0, apart - self._first.doubt_ns - self._last.doubt_ns)

    def ours(self, ns: int) -> int:
        span = self._last.at_ns - self._first.at_ns
        along = (ns - self._first.at_ns) / span if span > 0 else 0.0
        drift = self._last.ahead_ns - self._first.ahead_ns
        return ns - self._first.ahead_ns - round(drift * min(1.0, max(0.0, along)))


def seen(event: Any) -> Seen:
    """Converts one of `kineto_results.events()`."""
    begin, number = event.start_ns(), event.device_resource_id()
    on_host = event.device_type().name == "CPU"
    row = ("thread", -1, number) if on_host else ("stream", event.device_index(), number)
    end = begin + max(0, event.duration_ns())
    return Seen(event.name(), _kind(event, on_host), row, begin, end)


def _kind(event: Any, on_host: bool) -> str:
    if hasattr(event, "activity_type"):  # not in torch 2.11
        return str(event.activity_type())
    if event.is_user_annotation():
        return "user_annotation" if on_host else "gpu_user_annotation"
    return "cpu_op" if on_host else "kernel"


def longest(events: Sequence[Any], most: int) -> Sequence[Any]:
    """Returns the `most` longest of `kineto_results.events()`.

    No dropped event is longer than a kept one, so the callers of kept events are kept, too.
    """
    if len(events) <= most:
        return events
    return heapq.nlargest(most, events, key=lambda one: one.duration_ns())


def rows_of(events: Iterable[Seen]) -> list[tuple[str, list[Seen]]]:
    """Sorts events into named rows: threads by their first event, then streams by number.

    Slices in one row are nested or disjoint. If two slices overlap only partly, the later one gets
    a separate row.
    """
    by_row: dict[tuple[str, int, int], list[Seen]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda one: (one.begin_ns, -one.end_ns)):
        by_row[event.row].append(event)
    threads = [row for row in by_row if row[0] == "thread"]
    streams = sorted(row for row in by_row if row[0] == "stream")
    several = len({row[1] for row in streams}) > 1
    names = {row: f"thread {index}" for index, row in enumerate(threads, start=1)}
    for row in streams:
        names[row] = f"stream {row[2]}" + (f" of device {row[1]}" if several else "")
    made = []
    for row, name in names.items():
        for index, part in enumerate(_nested(by_row[row]), start=1):
            made.append((f"torch: {name}" + (f" ({index})" if index > 1 else ""), part))
    return made


def _nested(events: Iterable[Seen]) -> list[list[Seen]]:
    """Splits events, ordered by start, into rows in which slices are nested or disjoint."""
    rows: list[tuple[list[Seen], list[int]]] = []  # (events, ends of the open slices)
    for event in events:
        for _, ends in rows:
            while ends and ends[-1] <= event.begin_ns:
                ends.pop()
        fits = (row for row in rows if not row[1] or event.end_ns <= row[1][-1])
        row = next(fits, None)
        if row is None:
            row = [], []
            rows.append(row)
        row[0].append(event)
        row[1].append(event.end_ns)
    return [drawn for drawn, _ in rows]


def _micros(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def trace_text(rows: Iterable[tuple[str, list[Seen]]], clock: Clock, pid: int, offset: int) -> str:
    """Returns Chrome trace events: JSON objects separated by commas, without outer brackets.

    `offset` is added to CLOCK_MONOTONIC, in nanoseconds.
    """
    parts = []
    quoted: dict[str, str] = {}
    for tid, (title, events) in enumerate(rows, start=FIRST_ROW):
        at = f'"pid":{pid},"tid":{tid}'
        for name, args in (("name", {"name": title}), ("sort_index", {"sort_index": tid})):
            parts.append(f'{{"ph":"M","name":"thread_{name}",{at},"args":{json.dumps(args)}}}')
        for one in events:
            name = quoted.get(one.name) or json.dumps(one.name[:_LONGEST_NAME] or "?")
            quoted[one.name] = name
            begin, end = clock.ours(one.begin_ns), clock.ours(one.end_ns)
            parts.append(
                f'{{"ph":"X","name":{name},{at},"ts":{_micros(begin + offset)},'
                f'"dur":{_micros(end - begin)},"cat":"{one.kind}"}}'
            )
    return ",\n".join(parts)


def running() -> bool:
    """Whether a torch profiler is running in this process or on this thread."""
    here = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return bool(here or torch.autograd.profiler._is_profiler_enabled)


def _stop(profiler: torch.profiler.profile, made_by: int) -> None:
    if os.getpid() == made_by:  # a forked process has no profiler's thread
        profiler.stop()


def check_free() -> None:
    """Raises ConfigError if a torch profiler is already running."""
    if running():
        raise ConfigError(
            "[front::trace] profiler=True, but a torch profiler is running already, and a process "
            "can have only one: stop it first, or trace without profiler=True"
        )


class Profile:
    """torch's profiler. It runs from construction until `text()` or `stop()`.

    Both must be called on the constructing thread. Raises ConfigError if a torch profiler is
    already running.
    """

    def __init__(self, with_cuda: bool) -> None:
        check_free()
        activities = [ProfilerActivity.CPU]
        if with_cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        with warnings.catch_warnings():  # torch 2.11 warns of a second cycle; there is only one
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profiler.start()
        # It runs once, at the latest at exit.
        self.stop = weakref.finalize(self, _stop, self._profiler, os.getpid())
        self._first = read_mark(0)

    def text(self, offset_ns: int) -> str:
        """Stops the profiler and returns its events as part of a Chrome trace (see `trace_text`).

        An error becomes a warning and "", so that it does not end the run.
        """
        if not self.stop.alive:
            return ""
        try:
            last = read_mark(1)
            self.stop()
            return self._text(last, offset_ns)
        except Exception as error:
            _warn(f"events of torch's profiler are left out: {type(error).__name__}: {error}")
            return ""
        finally:
            self.stop()

    def _text(self, last: list[Reading], offset_ns: int) -> str:
        results: Any = getattr(self._profiler.profiler, "kineto_results", None)
        events, marks = [], {}
        for event in results.events():
            if event.name().startswith(_MARK):
                marks[event.name()] = seen(event)
            elif not event.is_hidden_event():
                events.append(event)
        clock = Clock(difference(self._first, marks), difference(last, marks))
        if clock.apart_ns > _APART_NS:
            _warn(
                f"the profiler's clock drifted by {clock.apart_ns / 1e6:.1f} ms while it ran: its "
                f"events are misplaced by up to this much"
            )
        kept = longest(events, MOST_EVENTS)
        if len(kept) < len(events):
            bound = min(event.duration_ns() for event in kept)
            _warn(
                f"the profiler saw {len(events)} events, but the trace has only the {MOST_EVENTS} "
                f"longest ({bound / 1e3:.1f} us or more): trace fewer steps to keep all events"
            )
        return trace_text(rows_of(map(seen, kept)), clock, ranks.rank(), offset_ns)


def _warn(text: str) -> None:
    warnings.warn(f"[monitor] rank {ranks.rank()}: {text}", RuntimeWarning, stacklevel=3)
