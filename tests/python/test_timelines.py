"""Timelines that are asked for from outside: penstock.trace(), variables, penstock run --trace."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from trace_format import read_trace

import penstock
from penstock import cli
from penstock.monitor import timelines
from penstock.monitor.trace_request import PROFILER, STEPS, TRACE


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timelines._Process, "named", 0)
    for name in (TRACE, STEPS, PROFILER):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start(config=None):
    return penstock.initialize(torch.nn.Linear(8, 8), config)


def steps(engine, count):
    for _ in range(count):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()


def steps_of(path):
    """Those that the trace has, and its ranks."""
    slices = [one for one in read_trace(path)["traceEvents"] if one.get("cat") == "step"]
    return sorted({one["args"]["step"] for one in slices}), sorted({one["pid"] for one in slices})


# ---- penstock.trace()


def test_the_engine_that_is_there(place):
    engine = start()
    steps(engine, 2)
    penstock.trace()
    steps(engine, 4)
    assert steps_of(place / "trace.json") == ([3, 4, 5], [0])
    penstock.trace("last.json", steps=None)
    assert steps_of(place / "last.json") == ([1, 2, 3, 4, 5, 6], [0])
    engine.close()


def test_the_engine_that_comes(place):
    with pytest.raises(penstock.ConfigError, match="no engine is open"):
        penstock.trace(steps=None)
    with pytest.raises(penstock.ConfigError, match="steps is 0"):
        penstock.trace(steps=0)
    penstock.trace(steps=2)
    engine = start()
    with torch.no_grad():
        engine(torch.ones(4, 8))  # is no step
    steps(engine, 3)
    assert steps_of(place / "trace.json") == ([1, 2], [0])
    engine.close()
    (place / "trace.json").unlink()
    engine = start()
    steps(engine, 3)
    engine.close()
    assert not (place / "trace.json").exists()


def test_which_engine(place):
    engines = [start(), start()]
    with pytest.raises(penstock.ConfigError, match="2 engines are open: call engine.trace"):
        penstock.trace()
    engines.pop().close()
    penstock.trace(steps=1)
    steps(engines[0], 1)
    engines.pop().close()
    assert steps_of(place / "trace.json") == ([1], [0])


# ---- variables


def test_by_the_environment(place, monkeypatch):
    monkeypatch.setenv(TRACE, "t.json")
    monkeypatch.setenv(STEPS, "2:3")
    first = start()
    os.makedirs("elsewhere")
    monkeypatch.chdir(place / "elsewhere")  # it is of where the engine was made
    steps(first, 4)
    assert steps_of(place / "t.json") == ([2, 3], [0])
    monkeypatch.chdir(place)
    with pytest.warns(UserWarning, match="another engine, whose trace is .*t.2.json"):
        second = start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = start()
    for engine in (second, third):
        steps(engine, 3)
        engine.close()
    assert steps_of(place / "t.2.json") == steps_of(place / "t.3.json") == ([2, 3], [0])
    first.close()


def test_steps_are_counted_from_where_a_run_begins(place, monkeypatch):
    engine = start()
    steps(engine, 7)
    engine.save(place / "saved")
    engine.close()
    monkeypatch.setenv(TRACE, "t.json")
    monkeypatch.setenv(STEPS, "2:3")
    engine = start()
    engine.load(place / "saved")
    steps(engine, 4)
    engine.close()
    assert steps_of(place / "t.json") == ([9, 10], [0])


@pytest.mark.parametrize(
    ("made", "said", "there"),
    [
        (0, "has none of these steps: the last step was 0, and no file is written", None),
        (1, "has none of these steps: the last step was 1, and the file has only the last", [1]),
        (3, "is not complete: the last step was 3, and the file has only the last", [1, 2, 3]),
    ],
)
def test_a_run_that_ends_before(made, said, there, place, monkeypatch):
    monkeypatch.setenv(TRACE, "t.json")
    monkeypatch.setenv(STEPS, "3:4")
    engine = start()
    steps(engine, made)
    with pytest.warns(RuntimeWarning, match=f"PENSTOCK_TRACE: .*t.json of steps 3 to 4 {said}"):
        engine.close()
    assert (place / "t.json").exists() == bool(there)
    assert not there or steps_of(place / "t.json")[0] == there


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {TRACE: "t.json", STEPS: "3"},
            r"PENSTOCK_TRACE_STEPS \(--trace-steps\) is 3; allowed: FI",
        ),
        ({TRACE: "t.json", STEPS: "3:2"}, "allowed: FIRST:LAST"),
        ({TRACE: "t.json", STEPS: "0:2"}, "allowed: FIRST:LAST"),
        ({TRACE: "t.json", PROFILER: "yes"}, "PENSTOCK_TRACE_PROFILER .* is yes; allowed: 0 or 1"),
        ({TRACE: "."}, "is ., a folder: give a file"),
        ({STEPS: "1:2", PROFILER: "1"}, "has no effect without a file"),
    ],
)
def test_wrong_values(values, said, monkeypatch):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(penstock.ConfigError, match=said):
        start()


def test_what_cannot_be_written_is_said_at_once(monkeypatch):
    monkeypatch.setenv(TRACE, "none/t.json")
    with pytest.raises(penstock.RuntimeFault, match="none is missing or not writable"):
        start()
    monkeypatch.setenv(TRACE, "t.json")
    with pytest.raises(penstock.ConfigError, match='"monitor.events" is 0'):
        start({"monitor": {"events": 0}})


def test_a_profiler_of_the_scripts_own_stays(place, monkeypatch):
    for name, value in ((TRACE, "t.json"), (STEPS, "1:2"), (PROFILER, "1")):
        monkeypatch.setenv(name, value)
    engine = start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.warns(RuntimeWarning, match="has no events of torch's profiler: another"):
            steps(engine, 1)
        steps(engine, 1)
    engine.close()
    assert steps_of(place / "t.json") == ([1, 2], [0])


# ---- the launcher

SCRIPT = """
    import torch, penstock
    engine = penstock.initialize(torch.nn.Linear(8, 8), {"strategy": "zero2"})
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    if penstock.front.ranks.rank() == 0:
        print("done", engine.steps)
"""


def run(place, *command):
    (place / "script.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    words = [sys.executable, "-m", *command, str(place / "script.py")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=env)
    assert (done.returncode, done.stdout) == (0, "done 4\n"), done.stderr
    return done.stderr


def test_run_with_trace(place):
    two = ("penstock", "run", "--nproc", "2")
    said = run(place, *two, "--trace", "t.json", "--trace-steps", "2:3", "--trace-profiler")
    assert steps_of(place / "t.json") == ([2, 3], [0, 1])
    events = read_trace(place / "t.json")["traceEvents"]
    assert {one["pid"] for one in events if one["name"] == "aten::addmm"} == {0, 1}
    assert "PENSTOCK_TRACE" not in said
    said = run(place, *two, "--trace", "late.json")  # and nobody closes the engine
    assert (
        said.count("late.json of steps 10 to 12 has none of these steps: the last step was 4") == 1
    )
    assert steps_of(place / "late.json") == ([1, 2, 3, 4], [0])


def test_torchrun(place, monkeypatch):
    monkeypatch.setenv(TRACE, "t.json")
    monkeypatch.setenv(STEPS, "1:1")
    run(place, "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert steps_of(place / "t.json") == ([1], [0, 1])


@pytest.fixture
def starts(place, capsys):
    """The vectors that options would start; or the error, where they start nothing."""
    (place / "train.py").touch()
    (place / "hosts").write_text("b slots=2\na slots=2\n", encoding="utf-8")

    def starts(options):
        code = cli.main(["run", "--dry-run", *options.split(), "train.py"])
        out, err = capsys.readouterr()
        return [shlex.split(line) for line in out.splitlines()] if code == 0 else err

    return starts


def test_ranks_on_other_nodes_get_it(starts, place):
    told = {f"{TRACE}={place}/x/t.json", f"{STEPS}=5:6", f"{PROFILER}=1"}
    trace = "--trace x/t.json --trace-steps 5:6 --trace-profiler"
    for vector in starts(f"--nproc 2 {trace}"):
        assert told < set(vector)
    for vector in starts(f"-H hosts --launcher ssh {trace}"):
        words = shlex.split(vector[-1].partition(" && exec ")[2])
        assert told < set(words[: words.index(sys.executable)])
    for launcher in ("openmpi", "mpich", "slurm"):
        (vector,) = starts(f"-H hosts --launcher {launcher} {trace}")
        assert told < set(vector)
        exported = {"openmpi": TRACE, "mpich": "-genvlist", "slurm": "--export=ALL"}[launcher]
        assert exported in vector
    assert not any(TRACE in word for vector in starts("--nproc 2") for word in vector)


def test_wrong_options(starts, place, monkeypatch, capsys):
    assert "(--trace-steps) is 6; allowed: FIRST:LAST" in starts("--trace t.json --trace-steps 6")
    assert f"give {TRACE} (--trace) too" in starts("--trace-profiler")
    assert "a folder" in starts("--trace .")
    monkeypatch.setenv(TRACE, "t.json")  # by hand, and so are the steps
    assert starts("--trace-steps 5:6")
    monkeypatch.setenv(STEPS, "six")
    assert "is six; allowed" in starts("")
    assert cli.main(["run", "--trace", "none/t.json", "--trace-steps", "1:1", "train.py"]) == 2
    assert "none is missing or not writable" in capsys.readouterr().err
