"""Traces: what Perfetto reads, against what the engine counted."""

from __future__ import annotations

import collections
import json
import time

import pytest
import torch
from trace_format import read_trace

import penstock
from penstock.monitor import predicted, report, run

STEPS = 3


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
    trace = read_trace(path)
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
    trace = read_trace(tmp_path / "last.json")
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert 32 <= len(slices) <= 64 and slices[-1]["args"]["step"] == 10
    with pytest.raises(penstock.ConfigError, match="1 or more"):
        engine.trace(tmp_path / "x.json", 0)
    with pytest.raises(penstock.RuntimeFault, match="cannot be written"):
        engine.trace(tmp_path / "no" / "x.json")
    with pytest.raises(penstock.RuntimeFault, match="does not exist or cannot be written to"):
        engine.trace(tmp_path / "no" / "x.json", 2)
    with pytest.raises(penstock.ConfigError, match="1.5; allowed: a whole number"):
        engine.trace(tmp_path / "x.json", 1.5)
    engine.close()


def test_steps_are_those_of_the_run_also_after_load(tmp_path):
    engine = penstock.initialize(model(), {"monitor": {"path": str(tmp_path / "a")}})
    steps(engine, 7)
    saved = engine.save(tmp_path / "checkpoints")
    engine.close()
    monitor = {"path": str(tmp_path / "b"), "trace_first": 2, "trace_steps": 1}
    engine = penstock.initialize(model(), {"monitor": monitor})
    engine.load(saved)

    def seen(path):
        events = json.loads(path.read_text())["traceEvents"]
        return {event["args"]["step"] for event in events if event["ph"] == "X"}

    steps(engine, 2)
    assert seen(tmp_path / "b" / "trace.json") == {9}
    engine.trace(tmp_path / "x.json", 2)
    steps(engine, 2)
    assert seen(tmp_path / "x.json") == {10, 11}
    engine.close()


def test_an_error_leaves_the_last_steps(tmp_path, capfd):
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x, fail=False):
            y = self.inner(x)
            if fail:
                raise ValueError("not today")
            return y

    engine = penstock.initialize(Fails(), {"monitor": {"path": str(tmp_path)}})
    steps(engine, 3)
    with pytest.raises(ValueError, match="not today"):
        engine(torch.randn(4, 128), fail=True)
    (path,) = tmp_path.glob("penstock-rank0-pid*.trace.json")
    said = (
        "penstock: rank 0, step 4, where its forward raised ValueError: not today; the last steps"
    )
    assert f"{said} are in {path}" in capfd.readouterr().err
    trace = read_trace(path)
    assert {1, 2, 3} <= {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"}
    engine.close()
    assert report.page([run.read(tmp_path)]).count('id="timeline"') == 1


def test_a_file_that_cannot_be_written_ends_no_step(tmp_path, capfd):
    engine = penstock.initialize(model(), {})
    (tmp_path / "gone").mkdir()
    engine.trace(tmp_path / "gone" / "x.json", 2)
    (tmp_path / "gone").rmdir()
    steps(engine, 3)
    assert engine.steps == 3
    assert "x.json cannot be written" in capfd.readouterr().err
    engine.close()


def test_what_the_config_asked_for_is_never_silent(tmp_path, capfd):
    for name in ("short", "replaced"):
        monitor = {"path": str(tmp_path / name), "trace_first": 5}
        engine = penstock.initialize(model(), {"monitor": monitor})
        steps(engine, 3)
        if name == "replaced":
            engine.trace(tmp_path / "x.json", 1)
            steps(engine, 1)
        engine.close()
        said = capfd.readouterr().err
        if name == "short":
            assert 'so the trace from "monitor.trace_first" 5 is incomplete' in said
            read_trace(tmp_path / name / "trace.json")
        else:
            assert f"is replaced by {tmp_path / 'x.json'}" in said


def asked_by_some(folder):
    engine = penstock.initialize(model(), {"strategy": "zero3", "comm": {"timeout_s": 20}})
    steps(engine, 1)
    if penstock.front.ranks.rank() == 1:
        engine.trace(f"{folder}/trace.json", 2)
    steps(engine, 3)
    engine.close()
    return engine.steps


def test_ranks_that_asked_for_no_trace_are_not_waited_for(pools, tmp_path):
    assert pools(2).run(asked_by_some, str(tmp_path)) == [4, 4]
    trace = json.loads((tmp_path / "trace.json.rank1").read_text())
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {2, 3}


class Reused(torch.nn.Module):
    """Uses its first block again after two others. In backward, the first block is entered before
    the others and ends after them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(model())

    def forward(self, x):
        first, second, third, last = self.layers
        return last(first(third(second(first(x)))))


def traced_backwards(path):
    torch.manual_seed(0)
    engine = penstock.initialize(Reused(), {"strategy": "zero3", "units": {"layer_bytes": 1000}})
    steps(engine, 3)
    engine.trace(path, STEPS)
    steps(engine, STEPS)
    engine.close()


def test_backwards_of_units_follow_each_other(pools, tmp_path):
    pools(2).run(traced_backwards, str(tmp_path / "trace.json"))
    events = read_trace(tmp_path / "trace.json")["traceEvents"]
    found = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["pid"] == 0 and event["name"].startswith("backward u")
    )
    assert len(found) >= 4 * STEPS
    assert all(begin >= end - 1 for (_, end), (begin, _) in zip(found, found[1:], strict=False))


def machine_file(path, **fields):
    path.write_text(json.dumps({"flops": 1e10, "local": 1e9, "device_memory": 5e9} | fields))
    return str(path)


def predicted_steps(config, path):
    engine = penstock.initialize(model(), config)
    steps(engine, 2)
    engine.trace(path, STEPS)
    steps(engine, STEPS)
    engine.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_seconds_are_predicted_beside_the_measured_ones(strategy, pools, tmp_path):
    monitor = {"path": str(tmp_path), "machine": machine_file(tmp_path / "machine.json")}
    config = {"strategy": strategy, "units": {"layer_bytes": 1000}, "monitor": monitor}
    pools(2).run(predicted_steps, config, str(tmp_path / "trace.json"))
    found = {line.name: line for line in predicted.lines(run.read(tmp_path).trace)}
    # A forward of [4, 128] by 128 x 128 weights, and of its backward the rest.
    forward = 1e3 * 2 * 4 * 128 * 128 / 1e10
    computed = [line for name, line in found.items() if name.startswith("forward u")]
    assert sum(line.predicted for line in computed) == pytest.approx(4 * forward)
    backward = [line for name, line in found.items() if name.startswith("backward u")]
    assert sum(line.predicted for line in backward) == pytest.approx(8 * forward)
    update = [line for name, line in found.items() if name.startswith("update u")]
    owned = 4 * (128 * 128 + 128) / (2 if strategy == "zero3" else 1)
    assert sum(line.predicted for line in update) == pytest.approx(1e3 * owned * 28 / 5e9, rel=0.01)
    sent = [line for name, line in found.items() if "all_gather" in name or "reduce" in name]
    assert sent and all(line.predicted > 0 and line.measured > 0 for line in sent)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["predicted"]["step_s"] > 0
    page = report.page([run.read(tmp_path)])
    assert 'id="predicted"' in page and "predicted step" in page
    assert predicted.kinds(list(found.values()))[0].count >= 1


def test_a_machine_is_read_once(tmp_path):
    path = tmp_path / "machine.json"
    machine_file(path)
    monitor = {"path": str(tmp_path / "run"), "machine": str(path), "trace_first": 2}
    engine = penstock.initialize(model(), {"monitor": monitor})
    path.unlink()
    steps(engine, 3)
    engine.close()
    assert predicted.lines(run.read(tmp_path / "run").trace)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read: No such file or directory; `penstock bench"),
        ("{", "is not JSON"),
        ('{"flop": 1}', 'unknown "flop"'),
        ('{"flops": -1}', "allowed: a number above 0"),
        ("folder", "is a folder"),
    ],
)
def test_a_machine_that_is_none(text, expected, tmp_path):
    path = tmp_path / "machine.json"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    with pytest.raises(penstock.ConfigError, match=expected):
        penstock.initialize(model(), {"monitor": {"machine": str(path)}})


def test_off(tmp_path):
    engine = penstock.initialize(model(), {"monitor": {"events": 0}})
    steps(engine, 2)
    assert engine._core.metrics.sums() == {}
    assert engine.metrics["step"] == 2 and engine.metrics["loss"] > 0
    for count in (1, None):
        with pytest.raises(penstock.ConfigError, match="so this run records no events"):
            engine.trace(tmp_path / "x.json", count)
    engine.close()


def test_by_the_config(tmp_path):
    config = {"monitor": {"path": str(tmp_path), "trace_first": 2, "trace_steps": 3}}
    engine = penstock.initialize(model(), config)
    steps(engine, 3)
    assert not (tmp_path / "trace.json").exists()
    steps(engine, 2)
    trace = read_trace(tmp_path / "trace.json")
    seen = {event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert seen == {2, 3, 4}
    engine.close()
