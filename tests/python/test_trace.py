"""Traces: what Perfetto reads, against what the engine counted."""

from __future__ import annotations

import collections
import json
import time

import pytest
import torch

import penstock

STEPS = 3
KINDS = ("compute", "line", "exchange", "wait", "step")


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def steps(engine, count):
    for _ in range(count):
        engine.backward(engine(torch.randn(4, 128)).square().mean())
        engine.step()


def traced(config, path):
    """Sums and bytes of the steps of the trace, as the engine counts them; and whether all that was
    recorded of the disk is what the ledger has."""
    engine = penstock.initialize(model(), {"units": {"layer_bytes": 1000}} | config)
    steps(engine, 2)
    before = engine._core.metrics.sums()
    engine.trace(path, STEPS)
    sent = 0
    for _ in range(STEPS):
        steps(engine, 1)
        sent += engine.metrics["comm_bytes"]
    sums = {
        key: tuple(a - b for a, b in zip(told, before.get(key, (0, 0, 0.0)), strict=True))
        for key, told in engine._core.metrics.sums().items()
    }
    reads = sums.get(("disk", "read"), (0, 0, 0.0))[1]
    time.sleep(0.2)  # writes end
    ledger, whole = engine.ledger()["measured"], engine._core.metrics.sums()
    for kind, bytes_of in (("read", "disk_read"), ("write", "disk_written")):
        assert whole.get(("disk", kind), (0, 0, 0.0))[1] == ledger[bytes_of]
    engine.close()
    return sums, sent, reads


def check_event(event):
    """What Perfetto's importer needs of the "Trace Event Format"."""
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
    assert event["ph"] in "MXbesf"
    if event["ph"] == "M":
        assert event["name"].startswith(("process_", "thread_")) and event["args"]
    else:
        assert event["ts"] > 0 and event.get("dur", 0) >= 0


def check_rows(events):
    """Slices of one thread: one after the other, or one within the other."""
    rows = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        ends = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)


def check_shape(trace):
    assert trace["displayTimeUnit"] == "ms"
    open_slices, arrows = collections.Counter(), collections.defaultdict(set)
    for event in trace["traceEvents"]:
        check_event(event)
        if event["ph"] in "be":
            open_slices[event["id"]] += 1 if event["ph"] == "b" else -1
        if event["ph"] in "sf":
            arrows[event["id"]].add(event["ph"])
    assert not any(open_slices.values())
    assert all("s" in ends for ends in arrows.values())
    check_rows(trace["traceEvents"])


def sums_of(trace, rank):
    """(row, kind) -> number, bytes and seconds of what the trace has of the rank."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == rank
    }
    sums, begun = collections.defaultdict(lambda: [0, 0, 0.0]), {}
    for event in trace["traceEvents"]:
        if event["pid"] != rank or event["ph"] not in "Xbe":
            continue
        one = sums[names[event["tid"]], event["cat"]]
        if event["ph"] == "e":
            one[2] += (event["ts"] - begun[event["id"]]) * 1e-6
            continue
        begun[event.get("id")] = event["ts"]
        one[0] += 1
        one[1] += event["args"].get("bytes", 0)
        one[2] += event.get("dur", 0.0) * 1e-6
        assert 2 < event["args"]["step"] <= 2 + STEPS
    return sums


@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "ddp"},
        {"strategy": "zero2"},
        {"strategy": "zero3"},
        {"strategy": "zero3", "offload": {"optimizer": "host"}},
        {"strategy": "zero3", "offload": {"optimizer": "disk", "params": "disk"}},
    ],
    ids=lambda config: "-".join([config["strategy"], *config.get("offload", {})]),
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_trace_is_what_was_counted(world, config, pools, tmp_path):
    path = tmp_path / "trace.json"
    if "offload" in config:
        config = config | {"offload": config["offload"] | {"path": str(tmp_path)}}
        if "params" not in config["offload"] and config["offload"]["optimizer"] == "host":
            del config["offload"]["path"]
    told = pools(world).run(traced, config, str(path))
    trace = json.loads(path.read_text())
    check_shape(trace)
    for rank, (sums, sent, reads) in enumerate(told):
        seen = sums_of(trace, rank)
        for key, (count, num_bytes, seconds) in sums.items():
            if key[0] == "disk" or count == 0:
                continue
            if key == ("model", "exchange"):  # also what gathers the trace
                assert seen[key][0] <= count
                continue
            assert seen[key][:2] == [count, num_bytes], key
            assert seen[key][2] == pytest.approx(seconds, rel=0.02, abs=2e-6), key
        assert sum(one[1] for key, one in seen.items() if key[1] == "exchange") == sent
        assert seen["model", "step"][0] == STEPS
        if "disk" in str(config):
            assert seen["disk", "read"][1] == reads > 0 and seen["disk", "write"][1] > 0
    forwards = sum(event["name"].startswith("forward u") for event in trace["traceEvents"])
    units = 5 if world == 2 and config["strategy"] == "zero3" else 1
    assert forwards == world * STEPS * units or "params" in config.get("offload", {})


def test_the_last_steps_are_always_there(tmp_path):
    engine = penstock.initialize(model(), {"monitor": {"events": 64}})
    steps(engine, 10)
    engine.trace(tmp_path / "last.json")
    trace = json.loads((tmp_path / "last.json").read_text())
    check_shape(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert 32 <= len(slices) <= 64 and slices[-1]["args"]["step"] == 10
    with pytest.raises(penstock.ConfigError, match="1 or more"):
        engine.trace(tmp_path / "x.json", 0)
    with pytest.raises(penstock.RuntimeFault, match="cannot be written"):
        engine.trace(tmp_path / "no" / "x.json")
    engine.close()


def test_off(tmp_path):
    engine = penstock.initialize(model(), {"monitor": {"events": 0}})
    steps(engine, 2)
    assert engine._core.metrics.sums() == {}
    assert engine.metrics["step"] == 2 and engine.metrics["loss"] > 0
    with pytest.raises(penstock.ConfigError, match="nothing of this run is recorded"):
        engine.trace(tmp_path / "x.json", 1)
    engine.close()


def test_by_the_config(tmp_path):
    config = {"monitor": {"path": str(tmp_path), "trace_first": 2, "trace_steps": 3}}
    engine = penstock.initialize(model(), config)
    steps(engine, 3)
    assert not (tmp_path / "trace.json").exists()
    steps(engine, 2)
    trace = json.loads((tmp_path / "trace.json").read_text())
    seen = {event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert seen == {2, 3, 4}
    engine.close()
