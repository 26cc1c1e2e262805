"""trace_format: each kind of mistake is seen."""

from __future__ import annotations

import copy

import pytest
from trace_format import check_trace


def meta(what, tid, **args):
    return {"ph": "M", "name": what, "pid": 0, "tid": tid, "args": args}


def timed(ph, ts, tid=0, **more):
    return {"ph": ph, "name": "a", "pid": 0, "tid": tid, "ts": ts, "cat": "line", **more}


RIGHT = [
    meta("process_name", 0, name="rank 0"),
    meta("process_sort_index", 0, sort_index=0),
    meta("thread_name", 0, name="model"),
    meta("thread_name", 1, name="gather"),
    timed("X", 10.0, dur=90.0, args={"step": 1}),
    timed("X", 20.5, dur=79.5),
    timed("X", 100.0, dur=0),
    timed("X", 5.0, tid=1, dur=6.0),
    timed("s", 10.999, tid=1, id="0.1"),
    timed("f", 50.0, id="0.1", bp="e"),
    timed("b", 10.0, id="0.2"),
    timed("e", 20.0, id="0.2"),
]


def test_what_is_right():
    check_trace(RIGHT)
    check_trace([])


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"args": {}}),
        (0, {"args": {"name": 7}}),
        (0, {"ph": "X"}),
        (1, {"args": {"sort_index": "0"}}),
        (2, {"name": "thread"}),
        (2, {"pid": 1}),
        (3, {"tid": 0}),
        (3, {"args": {"name": "model"}}),
        (4, {"name": ""}),
        (4, {"name": None}),
        (4, {"pid": "0"}),
        (4, {"tid": 2}),
        (4, {"ts": -1.0}),
        (4, {"ts": "10"}),
        (4, {"ph": "Z"}),
        (4, {"args": []}),
        (5, {"dur": 79.501}),
        (5, {"dur": -1}),
        (5, {"dur": None}),
        (5, {"cat": 1}),
        (8, {"ts": 11.0}),
        (8, {"ts": 4.0}),
        (8, {"ph": "f", "bp": "e"}),
        (8, {"id": "0.2"}),
        (9, {"bp": "s"}),
        (9, {"ts": 8.0}),
        (9, {"name": "b"}),
        (10, {"id": 2}),
        (10, {"cat": "read"}),
        (10, {"ts": 30.0}),
        (11, {"ph": "b"}),
        (11, {"name": "b"}),
    ],
)
def test_what_is_wrong(index, change):
    events = copy.deepcopy(RIGHT)
    events[index].update(change)
    with pytest.raises((AssertionError, KeyError)):
        check_trace(events)
