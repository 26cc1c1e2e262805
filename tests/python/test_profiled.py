"""Events of torch's profiler in a timeline: their clock, their rows, how many; and whole runs."""

from __future__ import annotations

import gc
import json
import time
import types

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function
from trace_format import check_trace, read_trace

import penstock
from penstock.monitor import profiled
from penstock.monitor.profiled import Clock, Difference, Profile, Reading, Seen

STEPS, LAYERS = 2, 3
CPU, STREAM = ("thread", -1, 4711), ("stream", 0, 7)


def event(begin, end, name="op", row=CPU, kind="cpu_op"):
    return Seen(name, kind, row, begin, end)


def parsed(text, rank=0):
    """The events of a part of a trace, checked beside what the rank itself writes."""
    events = json.loads(f"[{text}]")
    process = {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": "rank"}}
    check_trace([process, *events])
    return events


def names_of(events):
    names = [one for one in events if one["name"] == "thread_name"]
    return {one["tid"]: one["args"]["name"] for one in names}


def test_a_mark_bounds_the_difference_of_the_clocks():
    # Ours is 1000 behind: the narrow reading says so to within 10, the wide one to within 500.
    narrow, wide = Reading("a", 0, 20, 40), Reading("b", 100, 1100, 2100)
    events = {"a": event(1010, 1030), "b": event(1600, 2600)}
    found = profiled.difference([wide, narrow], events)
    assert found == Difference(1010, 1000, 10)
    assert profiled.difference([wide], events).doubt_ns == 500
    with pytest.raises(LookupError):
        profiled.difference([Reading("c", 0, 0, 0)], events)


def test_what_lies_between_two_marks_moves_with_them():
    clock = Clock(Difference(1000, 600, 2), Difference(2000, 700, 3))
    assert [clock.ours(ns) for ns in (900, 1000, 1500, 2000, 2100)] == [300, 400, 850, 1300, 1400]
    assert clock.apart_ns == 95
    assert Clock(Difference(0, 5, 9), Difference(9, 9, 0)).apart_ns == 0


def test_rows():
    other = ("thread", -1, 12)
    events = [
        event(0, 100, "outer"),
        event(10, 20, "inner"),
        event(20, 100, "until its end"),
        event(50, 150, "across"),
        event(100, 120, "next"),
        event(5, 6, row=other),
        event(30, 40, 'a "kernel"', STREAM, "kernel"),
        event(30, 35, "k2", ("stream", 1, 3), "kernel"),
    ]
    rows = profiled.rows_of(reversed(events))
    assert [(name, [one.name for one in row]) for name, row in rows] == [
        ("torch: thread 1", ["outer", "inner", "until its end", "next"]),
        ("torch: thread 1 (2)", ["across"]),
        ("torch: thread 2", ["op"]),
        ("torch: stream 7 of device 0", ['a "kernel"']),
        ("torch: stream 3 of device 1", ["k2"]),
    ]
    assert [name for name, _ in profiled.rows_of(events[:1] + events[6:7])] == [
        "torch: thread 1",
        "torch: stream 7",
    ]
    clock = Clock(Difference(0, -5_000_000, 0), Difference(9, -5_000_000, 0))
    told = parsed(profiled.trace_text(rows, clock, 3, 1_000_000), 3)
    (kernel,) = [one for one in told if one["name"] == 'a "kernel"']
    assert kernel == {
        **{"ph": "X", "name": 'a "kernel"', "pid": 3, "tid": profiled.FIRST_ROW + 3},
        **{"ts": 6000.03, "dur": 0.01, "cat": "kernel"},
    }
    assert sorted(names_of(told)) == list(range(profiled.FIRST_ROW, profiled.FIRST_ROW + 5))
    long = parsed(profiled.trace_text([("r", [event(0, 1, "k" * 999)])], clock, 0, 0))
    assert len(long[-1]["name"]) == 256


def test_of_too_many_the_longest_stay():
    events = [types.SimpleNamespace(duration_ns=lambda n=n: n % 7) for n in range(50)]
    assert profiled.longest(events, 50) is events
    assert [one.duration_ns() for one in profiled.longest(events, 8)] == [6] * 7 + [5]


def test_what_the_profiler_saw_is_where_it_was(monkeypatch):
    profile = Profile(False)
    begin = time.monotonic_ns()
    with record_function("mine"):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    end = time.monotonic_ns()
    time.sleep(0.02)
    still = record_function("still open")
    still.__enter__()
    events = parsed(profile.text(5_000_000))
    stopped = time.monotonic_ns()
    still.__exit__(None, None, None)
    assert not profiled.running() and profile.text(0) == ""
    at = {one["name"]: one for one in events}
    mine, product = at["mine"], at["aten::mm"]
    assert begin / 1e3 - 100 <= mine["ts"] - 5_000 <= product["ts"] - 5_000
    assert mine["ts"] + mine["dur"] - 5_000 <= end / 1e3 + 100
    assert mine["tid"] == product["tid"] == profiled.FIRST_ROW
    still = at.get("still open")  # torch 2.11 leaves it out
    assert still is None or still["ts"] + still["dur"] - 5_000 <= stopped / 1e3 + 100
    assert not any(one["name"].startswith(profiled._MARK) for one in events)

    monkeypatch.setattr(profiled, "MOST_EVENTS", 3)
    profile = Profile(False)
    for _ in range(5):
        torch.ones(8).add_(1)
    with pytest.warns(RuntimeWarning, match="saw [0-9]+ events, but the trace has only the 3 long"):
        assert len([one for one in parsed(profile.text(0)) if one["ph"] == "X"]) == 3


def test_what_goes_wrong_is_a_warning(monkeypatch):
    profile = Profile(False)
    monkeypatch.setattr(profiled, "rows_of", lambda events: 1 / 0)
    with pytest.warns(RuntimeWarning, match="are left out: ZeroDivisionError"):
        assert profile.text(0) == ""
    assert not profiled.running()


# ---- whole runs


class Layer(torch.nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.linear = index, torch.nn.Linear(64, 64)

    def forward(self, x):
        with record_function(f"layer {self.index}"):
            return self.linear(x).relu()


def start(config=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(index) for index in range(LAYERS)))
    return penstock.initialize(model, {"units": {"layer_bytes": 1000}} | (config or {}))


def steps(engine, count):
    for _ in range(count):
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()


def profiled_run(path):
    engine = start({"strategy": "zero3"})
    steps(engine, 2)
    engine.trace(path, STEPS, profiler=True)
    steps(engine, STEPS + 1)
    left = profiled.running()
    engine.close()
    return left


def ordered(slices, name):
    """Those whose names begin so: when they begin and end, in microseconds."""
    found = (one for one in slices if one["name"].startswith(name))
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in found)


@pytest.mark.parametrize("world", [1, 2])
def test_operators_are_within_what_runs_them(world, pools, tmp_path):
    """To within a millisecond, which other processes may take in between two readings."""
    assert pools(world).run(profiled_run, str(tmp_path / "t.json")) == [False] * world
    events = read_trace(tmp_path / "t.json")["traceEvents"]
    for rank in range(world):
        mine = [one for one in events if one["pid"] == rank]
        names = names_of(mine)
        assert names[0] == "model" and names[profiled.FIRST_ROW] == "torch: thread 1"
        slices = [one for one in mine if one["ph"] == "X"]
        theirs = [one for one in slices if one["tid"] >= profiled.FIRST_ROW]
        (first, _), (_, last) = ordered(slices, "step")
        assert all(first - 1000 < one["ts"] < last + 1000 for one in theirs)
        assert len(ordered(theirs, "aten::addmm")) == STEPS * LAYERS
        units = ordered(slices, "forward u")  # one rank alone has the root
        if world == 2:
            roots = ordered(slices, "forward u0")
            units = [one for one in units if one not in roots]
        within = [one for one in units for _ in range(LAYERS * STEPS // len(units))]
        for inner, outer in zip(ordered(theirs, "layer "), within, strict=True):
            assert outer[0] - 1000 < inner[0] and inner[1] < outer[1] + 1000


def test_one_profiler_at_a_time(tmp_path):
    engine = start()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        steps(engine, 1)
        with pytest.raises(penstock.ConfigError, match="a torch profiler is running"):
            engine.trace(tmp_path / "t.json", 1, profiler=True)
        engine.trace(tmp_path / "t.json", 1)  # needs none
        steps(engine, 1)
    assert any(one.name == "aten::addmm" for one in theirs.events())
    read_trace(tmp_path / "t.json")
    with pytest.raises(penstock.ConfigError, match="give steps"):
        engine.trace(tmp_path / "t.json", profiler=True)
    engine.close()


def test_it_stops_when_the_steps_do_not_come(tmp_path):
    engine = start()
    steps(engine, 1)
    engine.trace(tmp_path / "a.json", 3, profiler=True)
    assert profiled.running()
    steps(engine, 1)
    with pytest.warns(
        RuntimeWarning, match="not complete: the last step was 2, and .*b.json replaces it"
    ):
        engine.trace(tmp_path / "b.json", 3)
    assert not profiled.running()
    with pytest.warns(RuntimeWarning, match="b.json of steps 3 to 5 is not complete"):
        engine.trace(tmp_path / "b.json", 3, profiler=True)
    with pytest.warns(RuntimeWarning, match="c.json replaces it"):
        engine.trace(tmp_path / "c.json", 3, profiler=True)
    steps(engine, 2)
    with pytest.warns(RuntimeWarning, match="not complete: the last step was 4, and the file has"):
        engine.close()
    assert not profiled.running()
    seen = {
        one["args"]["step"]
        for one in read_trace(tmp_path / "c.json")["traceEvents"]
        if "dur" in one
    }
    assert seen == {1, 2, 3, 4}
    assert not (tmp_path / "a.json").exists() and not (tmp_path / "b.json").exists()


def test_an_engine_that_nobody_has_leaves_no_profiler(tmp_path):
    engine = start()
    engine.trace(tmp_path / "t.json", 3, profiler=True)
    steps(engine, 1)
    del engine
    gc.collect()
    assert not profiled.running()
