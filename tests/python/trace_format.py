"""What a trace must be for Perfetto's importer and chrome://tracing: the "Trace Event Format".

Stricter than these: what they drop or repair with a count somewhere is an error here.
"""

from __future__ import annotations

import bisect
import collections
import json
import numbers

NAMES = {"process_name": "name", "thread_name": "name"}
NAMES |= {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}


def read_trace(path):
    """The file's object, checked."""

    def refuse(constant):
        raise AssertionError(f"JSON has no {constant}")

    trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    check_trace(trace["traceEvents"])
    return trace


def check_trace(events):
    """Raises AssertionError at the first event that is none of the format, or does not fit."""
    phases = collections.defaultdict(list)
    for event in events:
        _check_fields(event)
        phases[event["ph"]].append(event)
    _check_names(phases["M"], [one for one in events if one["ph"] != "M"])
    rows = _check_nesting(phases["X"])
    _check_async(phases["b"], phases["e"])
    _check_flows(phases["s"], phases["f"], rows)


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fields(event):
    told = f"in {event}"
    assert event["ph"] in set("MXbesf"), told
    assert isinstance(event["name"], str) and event["name"], told
    assert _is_whole(event["pid"]) and event["pid"] >= 0, told
    assert _is_whole(event["tid"]) and event["tid"] >= 0, told
    assert isinstance(event.get("args", {}), dict), told
    if event["ph"] == "M":
        value = event["args"][NAMES[event["name"]]]
        assert isinstance(value, str) and value if value_is_text(event) else _is_whole(value), told
        return
    assert _is_number(event["ts"]) and event["ts"] >= 0, told
    assert isinstance(event["cat"], str) and event["cat"], told
    if event["ph"] == "X":
        assert _is_number(event["dur"]) and event["dur"] >= 0, told
    else:
        assert isinstance(event["id"], str) and event["id"], told
        assert "dur" not in event, told


def value_is_text(event):
    return NAMES[event["name"]] == "name"


def _check_names(given, events):
    """Each process and each row has one name, and in a process no two rows have the same."""
    processes, rows = {}, {}
    for event in given:
        if event["name"] == "process_name":
            assert event["pid"] not in processes, event
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in rows, event
            rows[event["pid"], event["tid"]] = event["args"]["name"]
    assert len({(key[0], name) for key, name in rows.items()}) == len(rows)
    for event in events:
        assert event["pid"] in processes and (event["pid"], event["tid"]) in rows, event


def _ns(micros):
    return round(micros * 1000)


def _check_nesting(slices):
    """Slices of a row: one after the other, or one within the other. Returns each row's, by when
    they begin."""
    rows = collections.defaultdict(list)
    for event in slices:
        begin = _ns(event["ts"])
        rows[event["pid"], event["tid"]].append((begin, begin + _ns(event["dur"]), event["name"]))
    for row, several in rows.items():
        several.sort(key=lambda one: (one[0], -one[1]))
        open_slices = []
        for one in several:
            while open_slices and open_slices[-1][1] <= one[0]:
                open_slices.pop()
            assert not open_slices or one[1] <= open_slices[-1][1], (row, one, open_slices[-1])
            open_slices.append(one)
    return rows


def _check_async(begins, ends):
    """One end for each beginning, by category and id."""
    opened = {(one["cat"], one["id"]): one for one in begins}
    closed = {(one["cat"], one["id"]): one for one in ends}
    assert len(opened) == len(begins) and len(closed) == len(ends)
    assert opened.keys() == closed.keys()
    for key, begin in opened.items():
        end = closed[key]
        assert (begin["pid"], begin["name"]) == (end["pid"], end["name"]), (begin, end)
        assert end["ts"] >= begin["ts"], (begin, end)


def _check_flows(starts, ends, rows):
    """Arrows begin once, end later, and at both ends are within a slice."""
    begun = {(one["cat"], one["id"]): one for one in starts}
    assert len(begun) == len(starts)
    ended = set()
    for one in ends:
        assert one["bp"] == "e", one
        key = one["cat"], one["id"]
        ended.add(key)
        assert begun[key]["name"] == one["name"], one
        assert begun[key]["ts"] <= one["ts"], (begun[key], one)
    assert ended == begun.keys()
    for one in [*starts, *ends]:
        _check_bound(one, rows[one["pid"], one["tid"]])


def _check_bound(event, slices):
    at = _ns(event["ts"])
    index = bisect.bisect_right(slices, at, key=lambda one: one[0])
    # Of the slices before it only those around it count; the last to begin may be over already.
    for begin, end, _ in reversed(slices[:index]):
        if at < end or begin == at == end:
            return
    raise AssertionError(f"{event} is in no slice")
