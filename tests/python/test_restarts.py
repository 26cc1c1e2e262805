"""Runs that go on: after a rank was killed, on other ranks, and from a save on a signal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from ports import free_port

NUM_KILLS, NUM_KILLS_FULL = 1, 20
STEPS = 30
SCRIPT = """
import os, sys, time, torch, penstock
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
folder, steps, pause, result = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 4))
engine = penstock.initialize(
    model,
    {"strategy": "zero2", "comm": {"timeout_s": 30}, "seed": 1,
     "checkpoint": {"path": folder, "keep": 2, "signals": ["SIGTERM", "SIGUSR1"]}},
    optimizer={"type": "AdamW", "lr": 0.01},
)
data = torch.randn(600, 8, generator=torch.Generator().manual_seed(5))
loader = penstock.ResumableLoader(TensorDataset(data), batch_size=2, seed=4)
engine.register_for_checkpointing(loader)
engine.load("auto")
print(f"at {engine.steps}, rank of {engine.data_size}", flush=True)
while engine.steps < steps:
    for (x,) in loader:
        engine.backward(engine(x).square().mean())
        engine.step()
        time.sleep(pause)
        while engine.steps == steps - 1 and os.path.exists(result + ".hold"):
            time.sleep(0.01)
        if engine.steps % 5 == 0 and not os.path.exists(result + ".quiet"):
            engine.save(wait=engine.steps % 2 == 0)
        if engine.steps == steps:
            break
weights = engine.state_dict()
if weights:
    torch.save(weights, result)
engine.close()
print(f"done {engine.steps}", flush=True)
"""


def pytest_generate_tests(metafunc):
    if "kill" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("kill", range(NUM_KILLS_FULL if full else NUM_KILLS))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("restarts") / "train.py"
    path.write_text(SCRIPT)
    return path


def launch(script, folder, *options, nproc=3, steps=STEPS, pause=0.0, result="weights.pt"):
    command = [sys.executable, "-m", "penstock", "run", "--nproc", str(nproc), "--grace-s", "5"]
    args = [str(folder / "ck"), str(steps), str(pause), str(folder / result)]
    return subprocess.Popen(
        [*command, *options, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run, timeout=240):
    try:
        said, _ = run.communicate(timeout=timeout)
    finally:
        run.kill()
    return said


@pytest.fixture(scope="module")
def undisturbed(script, tmp_path_factory):
    """The weights of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = launch(script, folder)
    assert "done" in finish(run)
    assert run.returncode == 0
    return torch.load(folder / "weights.pt", weights_only=True)


def same(folder, weights):
    found = torch.load(folder / "weights.pt", weights_only=True)
    return all(found[name].equal(weights[name]) for name in weights)


def rank_process(run, rank):
    """Of the run's ranks the one that was asked for; None where it has not started."""
    for child in psutil.Process(run.pid).children():
        try:
            if child.environ().get("RANK") == str(rank):
                return child
        except psutil.Error:
            pass
    return None


def test_a_killed_rank_changes_nothing(kill, script, undisturbed, tmp_path):
    chance = random.Random(kill)
    hold = tmp_path / "weights.pt.hold"  # no run ends before its rank is killed
    hold.touch()
    run = launch(script, tmp_path, "--max-restarts", "3", pause=0.03)
    said = []
    for line in run.stdout:
        said.append(line)
        if "at 0" in line:  # ranks write side by side
            break
    time.sleep(chance.uniform(0.0, 0.9))
    rank_process(run, chance.randrange(3)).send_signal(signal.SIGKILL)
    hold.unlink()
    said.append(finish(run))
    assert run.returncode == 0, "".join(said)
    assert "restart 1 of 3" in "".join(said)
    assert same(tmp_path, undisturbed)


def test_no_restart_is_left(script, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; print('tried', flush=True); sys.exit(7)")
    run = launch(broken, tmp_path, "--max-restarts", "2", nproc=1)
    assert finish(run).count("tried") == 3
    assert run.returncode == 7


@pytest.mark.parametrize("victim", ["launcher", "a rank"])
def test_sigterm_saves_and_ends(victim, script, undisturbed, tmp_path):
    run = launch(script, tmp_path, pause=0.5)  # the signal comes long before the end
    assert any("at 0" in line for line in run.stdout)
    time.sleep(0.6)
    if victim == "launcher":
        run.send_signal(signal.SIGTERM)
    else:
        rank_process(run, 1).send_signal(signal.SIGTERM)
    finish(run)
    assert run.returncode == 128 + signal.SIGTERM
    saved = (tmp_path / "ck" / "latest").read_text().strip()
    again = launch(script, tmp_path)
    said = finish(again)
    assert f"at {saved.removeprefix('step-')}" in said
    assert same(tmp_path, undisturbed)


def test_sigusr1_saves_and_goes_on(script, undisturbed, tmp_path):
    (tmp_path / "weights.pt.quiet").touch()  # only the signal saves
    hold = tmp_path / "weights.pt.hold"  # the run does not end before the signal
    hold.touch()
    run = launch(script, tmp_path, pause=0.1)
    assert any("at 0" in line for line in run.stdout)
    rank_process(run, 2).send_signal(signal.SIGUSR1)
    hold.unlink()
    assert "done" in finish(run)
    assert (tmp_path / "ck" / "latest").exists()
    assert same(tmp_path, undisturbed)


def test_resume_says_what_auto_means(script, tmp_path):
    finish(launch(script, tmp_path, steps=12))
    assert "at 5" in finish(
        launch(script, tmp_path, "--resume", str(tmp_path / "ck" / "step-5"), steps=12)
    )
    assert "at 0" in finish(launch(script, tmp_path, "--resume", "never", steps=12))


def test_nodes_come_later_and_go(script, tmp_path):
    """A node joins another that trains already; it goes, and the other goes on alone."""
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--max-restarts", "3"]

    def node():
        return launch(script, tmp_path, *options, nproc=1, steps=40, pause=0.2)

    hold = tmp_path / "weights.pt.hold"  # the run does not end before both nodes train
    hold.touch()
    runs = [node()]
    seen = []

    def wait_for(text):
        for line in runs[0].stdout:
            seen.append(line)
            if text in line:
                return

    wait_for("rank of 1")
    runs.append(node())
    wait_for("rank of 2")
    time.sleep(1.5)
    runs[1].kill()  # the node, and with it its rank
    hold.unlink()
    joined = runs[1].stdout.read()
    said = "".join(seen) + finish(runs[0], timeout=240)
    assert runs[0].returncode == 0, f"the first node:\n{said}\nthe second:\n{joined}"
    assert "rank of 2" in joined
    assert "done 40" in said
    runs[1].stdout.close()
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(p))]


def cmdline(process):
    try:
        return process.cmdline() if process.pid != os.getpid() else []
    except psutil.Error:
        return []
