"""Nothing left behind: a run with everything on disk, killed at some moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time

import psutil
from conftest import shared_memory

MARK = "PENSTOCK_TEST_MARK"  # in the environment of all that a test starts
NUM_KILLS, NUM_KILLS_FULL = 5, 100
GRACE_S, SLACK_S = 5, 20  # of the launcher, and for two shared cores to get there
VICTIMS = ("rank 0", "launcher", "rank 1")
# After the launch, after rank 0 has said so, and within how many seconds of it.
MOMENTS = {"training": 0.7, "initialize": 0.3, "launch": 4.0}
SCRIPT = """
import sys, torch, torch.distributed as dist, penstock
from torch import nn

def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
offload = {"optimizer": "disk", "params": "disk", "path": sys.argv[1]}
say("initialize")
engine = penstock.initialize(
    model,
    {"optimizer": {"type": "AdamW"}, "units": {"modules": ["Linear"]}, "offload": offload},
)
while True:
    engine.backward(engine(torch.ones(2, 512)).square().mean())
    engine.step()
    say("training")
"""


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("full")
    metafunc.parametrize("seed", range(NUM_KILLS_FULL if full else NUM_KILLS))


def alive(mark):
    """The processes that a test started and that still run."""

    def ours(process):
        try:
            running = process.status() != psutil.STATUS_ZOMBIE
            return running and process.environ().get(MARK) == mark
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if ours(process)]


def rank_of(process):
    try:
        return f"rank {process.environ()['RANK']}"
    except (psutil.Error, KeyError):
        return ""


def wait_for(moment, launcher, chance):
    """Until the moment has come, by what rank 0 says, and then a little more."""
    for line in launcher.stdout if moment != "launch" else ():
        if line.strip() == moment:
            break
    time.sleep(chance.uniform(0.0, MOMENTS[moment]))  # the moment is the test's parameter


def kill(victim, launcher):
    for process in psutil.Process(launcher.pid).children():
        if rank_of(process) == victim:
            process.kill()
            return
    launcher.kill()  # or it has not come to that rank yet


def gone(mark):
    """Whether all processes end in time; a killed one may have the disk to wait for."""
    deadline = time.monotonic() + SLACK_S
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(mark)


def test_a_kill_leaves_nothing(seed, tmp_path):
    victim, moment = VICTIMS[seed % 3], list(MOMENTS)[(seed + seed // 3) % 3]
    mark = f"{tmp_path}-{os.getpid()}"
    script, swap, temporary = tmp_path / "script.py", tmp_path / "swap", tmp_path / "temporary"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    swap.mkdir()
    temporary.mkdir()
    before = shared_memory()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "--nproc", "2", "--grace-s", str(GRACE_S),
         str(script), str(swap)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {MARK: mark, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        wait_for(moment, launcher, random.Random(seed))
        kill(victim, launcher)
        code = launcher.wait(GRACE_S + SLACK_S)
        assert code != 0, "the kill came to nothing"
        assert gone(mark), f"outlived the launcher: {alive(mark)}"
    finally:
        launcher.stdout.close()
        for process in alive(mark):
            process.kill()
        launcher.wait()
    assert not list(swap.iterdir()), "swap files were left"
    assert not list(temporary.glob("*penstock*")), "temporary files were left"
    left = shared_memory() - before
    assert not left, f"left in /dev/shm: {left}"
