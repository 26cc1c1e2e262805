"""penstock status and comm.warn_s: what is seen of a run that hangs."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

SCRIPT = """
import os, pathlib, sys, time
import torch, penstock
rank = int(os.environ["RANK"])
here = pathlib.Path(__file__).parent

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 64)
    def forward(self, x):
        if rank == 0 and stuck["now"] and self is model.blocks[1]:
            (here / "stuck").touch()
            while not (here / "go").exists():  # in Python, with the GIL taken now and then
                time.sleep(0.02)
        return torch.relu(self.up(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

stuck = {"now": False}
model = Model()
engine = penstock.initialize(model, {
    "strategy": "zero3", "prefetch_bytes": 0,
    "comm": {"warn_s": 0.3, "timeout_s": 600, "bucket_bytes": 0},
})
for step in range(3):
    stuck["now"] = step == 2
    engine.backward(engine(torch.ones(2, 64)))
    engine.step()
print("closing", file=sys.stderr, flush=True)
engine.close()
print("fds", sum("penstock" in os.readlink(f"/proc/self/fd/{fd}")
    for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    file=sys.stderr, flush=True)
"""


def status(*args):
    return subprocess.run(
        [sys.executable, "-m", "penstock", "status", *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def is_of_the_stuck_rank(line):
    return "step 3: waiting" in line and "move u3 param all_gather" in line


def wait_for(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


class Run:
    """Two ranks, one stuck in the third step's forward."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(script)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self.reader.start()

    def ranks(self):
        return psutil.Process(self.process.pid).children()

    def end(self):
        (self.folder / "go").touch()
        code = self.process.wait(timeout=240)
        self.reader.join()
        return code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("status"))
    try:
        wait_for((run.folder / "stuck").exists)
        wait_for(lambda: any(is_of_the_stuck_rank(line) for line in run.lines))
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def test_the_launcher_and_each_rank_show_all(run):
    by_launcher = status(str(run.process.pid))
    assert by_launcher.returncode == 0, by_launcher.stderr
    print(by_launcher.stdout)
    head, first, second, verdict = by_launcher.stdout.splitlines()
    assert head.split() == ["rank", "pid", "step", "for", "what"]
    pids = {str(rank.pid) for rank in run.ranks()}
    assert {first.split()[1], second.split()[1]} == pids
    # The late one is where it sleeps; the other waits for it a layer further on.
    assert re.match(r" +0 +\d+ +3 +[\d.]+ s  at `forward u2 .*blocks\.1", first), first
    assert re.match(
        r" +1 +\d+ +3 +[\d.]+ s  waits for rank 0 in `move u3 param all_gather", second
    ), second
    assert verdict == "late: rank 0"
    by_rank = status(first.split()[1])
    texts = (by_rank.stdout, by_launcher.stdout)
    shown = [re.sub(r"[\d.]+ s ", "", text).split() for text in texts]  # but for the seconds
    assert shown[0] == shown[1]


def test_a_rank_that_was_stopped_is_said_to_be(run):
    late = next(rank for rank in run.ranks() if rank.environ()["RANK"] == "0")
    late.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: late.status() == psutil.STATUS_STOPPED)
        shown = status(str(late.pid)).stdout
        assert "stopped by a signal; at `forward u2" in shown
    finally:
        late.send_signal(signal.SIGCONT)


def test_the_log_has_the_last_lines_of_the_plan(run):
    late = next(rank for rank in run.ranks() if rank.environ()["RANK"] == "0")
    lines = status(str(late.pid), "--log").stdout.splitlines()
    assert lines[0].startswith(f"rank 0 (process {late.pid}), its last ")
    assert len(lines) <= 201
    assert re.match(r"step 3 +[\d.]+ s ago  forward u2", lines[-1]), lines[-1]
    assert any("step 2 " in line and "update u" in line for line in lines)


def test_a_long_wait_is_one_line(run):
    # On a busy machine there may be others, of earlier lines of the plan.
    warnings = [line for line in run.lines if is_of_the_stuck_rank(line)]
    assert len(warnings) == 1, warnings
    pid = next(rank.pid for rank in run.ranks() if rank.environ()["RANK"] == "1")
    assert re.fullmatch(
        r"\[rank 1\] penstock: rank 1, step 3: waiting \d+ s for rank 0 in "
        rf"`move u3 param all_gather.*`; `penstock status {pid}` shows all ranks\n",
        warnings[0],
    ), warnings


def test_nothing_is_left_after_the_end(run):
    """Ends the run, so it is the last of those that look at it."""
    ranks = run.ranks()
    assert run.end() == 0
    assert not any(rank.is_running() for rank in ranks)
    open_files = sorted(line for line in run.lines if "fds" in line)
    assert open_files == ["[rank 0] fds 0\n", "[rank 1] fds 0\n"]
    assert not [name for name in os.listdir("/dev/shm") if "penstock" in name]
    assert status(str(ranks[0].pid)).returncode == 2


WRONG = {
    "no process": ("4194303", "there is no process 4194303"),
    "another's": ("", "have no engine"),
    "no number": ("run", "invalid int value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pids_are_one_sentence(name):
    pid, says = WRONG[name]
    with subprocess.Popen(["sleep", "30"]) as other:
        done = status(pid or str(other.pid))
        other.kill()
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]


def test_one_rank_alone_has_a_status_until_it_closes():
    import models  # noqa: PLC0415

    import penstock  # noqa: PLC0415
    from penstock.cli import live_status  # noqa: PLC0415

    gc.collect()  # engines of other tests that were not closed
    engine = penstock.initialize(models.build("gpt"), {})
    ((_, board),) = live_status.of_process(os.getpid(), "status")
    assert (board.rank, board.size, board.at.text) == (0, 1, "the caller's code, after initialize")
    engine.close()
    assert live_status.of(os.getpid()) == []
