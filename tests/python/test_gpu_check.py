"""tools/gpu_check: what is done stays done until its sources change; nothing outlives its time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "gpu"))

import check  # noqa: E402
import source_tree  # noqa: E402
import stages  # noqa: E402
import summary  # noqa: E402
from running import Runner  # noqa: E402


@pytest.mark.parametrize("tool", ["gpu_bundle", "gpu_check"])
def test_help(tool):
    command = [str(ROOT / "tools" / tool), "--help"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_a_tree_that_was_sent_again_keeps_its_times(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "src").mkdir(parents=True)
    (source / "build").mkdir()
    for name in ("src/a.cpp", "src/b.cpp", "build/left_out"):
        (source / name).write_text(name, encoding="utf-8")
    source_tree.mirror(source, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.cpp")}
    digest = source_tree.digest(copy, ["src"])
    assert len(before) == 2 and not (copy / "build").exists()
    os.utime(source / "src" / "a.cpp", (1e9, 1e9))
    source_tree.mirror(source, copy)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.cpp")} == before
    assert source_tree.digest(copy, ["src"]) == digest
    (source / "src" / "b.cpp").unlink()
    source_tree.mirror(source, copy)
    assert not (copy / "src" / "b.cpp").exists() and source_tree.digest(copy, ["src"]) != digest


def test_a_command_ends_with_all_that_it_started(tmp_path):
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    runner = Runner(tmp_path, tmp_path / "logs", {"GREETING": "hello"})
    begin = time.monotonic()
    done = runner.run("slow", [sys.executable, "-c", script], 0.5)
    assert done.timed_out and not done.good and time.monotonic() - begin < 30
    done = runner.run("quick", ["sh", "-c", "echo $GREETING; exit 3"], 30)
    assert (done.code, done.timed_out, done.text()) == (3, False, "hello\n")


@pytest.fixture
def run_once(tmp_path):
    """One stage, with what the report has of it; how often it ran."""
    report = check.Report(tmp_path / "report.json", {"stages": {}})
    of = stages.Check(tmp_path, tmp_path, "cpu", 1, [])
    outcomes, ran = [], []

    def body(_, limit_s):
        ran.append(limit_s)
        return outcomes.pop()

    stage = stages.Stage("one", body, (), least_s=5, most_s=20)

    def run(key, outcome="done", left_s=100.0):
        of.key, outcomes[:] = key, [stages.Outcome(outcome)]
        found = check.run_stage(stage, of, report, left_s)
        report.whole["stages"]["one"] = found
        return found["status"], len(ran)

    return run


def test_what_is_done_is_kept_until_its_sources_change(run_once):
    assert run_once("a", left_s=2.0) == ("not run", 0)
    assert run_once("a", "out of time") == ("out of time", 1)
    assert run_once("a") == ("done", 2)
    assert run_once("a") == ("done", 2)
    assert run_once("b", "failed") == ("failed", 3)
    assert run_once("b") == ("failed", 3)
    assert run_once("a") == ("done", 4)


def test_summary_names_what_failed():
    machine = dict.fromkeys(["driver", "cuda", "torch", "python", "compiler", "processor"], "x")
    machine |= {"devices": [], "cores": 2, "memory_gib": 1, "available_gib": 1, "disk_free_gib": 1}
    found = {
        "device": "sim",
        "commit": "",
        "machine": machine,
        "stages": {
            "build": {"status": "failed", "seconds_in_all": 3.0, "tail": "error: no such thing"},
            "link": {"status": "not run", "why": "2 s were left"},
        },
    }
    text = summary.text(json.loads(json.dumps(found)))
    assert "error: no such thing" in text and "2 s were left" in text
