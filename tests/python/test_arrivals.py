"""Ranks that hang in init_process_group, before they have an engine: which have not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from penstock.launch import arrivals, proc
from penstock.launch.arrivals import Arrival

SCRIPT = """
import os, pathlib, sys, time
import torch.distributed as dist
here = pathlib.Path(__file__).parent
while os.environ["RANK"] == "1" and not (here / "go").exists():
    time.sleep(0.02)
dist.init_process_group("gloo")
(here / ("there" + os.environ["RANK"])).touch()
while not (here / "end").exists():
    time.sleep(0.02)
"""

# `penstock run` that names missing ranks sooner.
RUN = """
import runpy, sys
from penstock.launch import local
local._ARRIVAL_S = 1.0
runpy.run_module("penstock", run_name="__main__")
"""


def wait_for(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def command(*args):
    run = [sys.executable, "-m", "penstock", *args]
    return subprocess.run(run, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launcher = subprocess.Popen(
        [sys.executable, "-c", RUN, "run", "--nproc", "2", str(script)],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "stderr").open("w"),
    )
    try:
        yield launcher
        (tmp_path / "go").touch()
        (tmp_path / "end").touch()
        assert launcher.wait(timeout=240) == 0
    finally:
        launcher.kill()
        launcher.wait()


def missing(launcher):
    return arrivals.sentences(proc.descendants(launcher.pid))


def test_the_missing_rank_is_named(run, tmp_path):
    wait_for(lambda: missing(run))
    (text,) = missing(run)
    ranks = {
        process.environ()["RANK"]: process.pid
        for process in psutil.Process(run.pid).children(recursive=True)
    }
    assert f"rank 1 (process {ranks['1']}) has not reached init_process_group" in text
    assert f"rank 0 (process {ranks['0']}) waits there" in text

    by_pid = command("status", str(run.pid))
    assert by_pid.returncode != 0 and text in by_pid.stderr
    assert text in command("status").stdout
    assert text in command("doctor").stdout

    line = f"penstock run: {text}; `penstock status {run.pid}` shows this again\n"
    wait_for(lambda: (tmp_path / "stderr").read_text() == line)

    said: list[str] = []
    with arrivals.watched(list(ranks.values()), said.append, 0.05):
        wait_for(lambda: said)
        (tmp_path / "go").touch()
        wait_for(lambda: (tmp_path / "there1").exists())
        wait_for(lambda: not missing(run))
    assert said == [text]  # once


def test_the_watch_ends_with_its_context():
    before = threading.active_count()
    with arrivals.watched([os.getpid()], pytest.fail, 60.0):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def arrival(rank, *, connected):
    return Arrival(rank, 4, 100 + rank, "host:1", connected)


TEXTS = {
    "none came": ([False, False], ""),
    "all came": ([True, True], ""),
    "one waits": (
        [False, True],
        "rank 0 (process 100) has not reached init_process_group (no connection to the store "
        "host:1); rank 1 (process 101) waits there",
    ),
    "several": (
        [False, True, False, True],
        "ranks 0 (process 100), 2 (process 102) have not reached init_process_group (no connection "
        "to the store host:1); ranks 1 (process 101), 3 (process 103) wait there",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts(case):
    there, text = TEXTS[case]
    assert arrivals.sentence([arrival(i, connected=one) for i, one in enumerate(there)]) == text


def test_a_process_that_is_no_rank_is_left_out(monkeypatch):
    assert arrivals.look([os.getpid(), 2**22 + 1]) == []
