"""penstock run: what a user sees when ranks succeed, fail, are killed, hang, or are interrupted.

The scripts use no torch, so each case costs one start of the launcher.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from ports import free_port

# Set by each test for its ranks, so that survivors can be found by it.
MARK = "PENSTOCK_TEST_MARK"


class Launcher:
    """`penstock run` on a script given as text."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.mark = f"{folder}-{os.getpid()}"

    def start(self, script: str, *options: str) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "run", *options, str(path), "--flag", "two words"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self.mark},
        )

    def run(self, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *options)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def survivors(self) -> list[psutil.Process]:
        def marked(process: psutil.Process) -> bool:
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                return alive and process.environ().get(MARK) == self.mark
            except psutil.Error:
                return False

        return [process for process in psutil.process_iter() if marked(process)]


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.survivors()
    for process in left:
        process.kill()
    assert not left, f"outlived the launcher: {left}"


TWO = ("--nproc", "2")

# Each rank leaves a file, then waits for the others' files: no rank acts before all have started.
MEET = """
import os, pathlib, signal, subprocess, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def meet():
    here = pathlib.Path(__file__).parent
    (here / f"rank{rank}").touch()
    while len(list(here.glob("rank*"))) < world:
        time.sleep(0.01)
"""


def test_environment_output_and_arguments(launcher):
    done = launcher.run(
        """
        import os, sys
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
        print(*(os.environ[name] for name in names), *sys.argv[1:])
        assert int(os.environ["MASTER_PORT"]) > 0
        assert int(os.environ["OMP_NUM_THREADS"]) >= 1
        print("noted", file=sys.stderr)
        """,
        *TWO,
    )
    assert done.returncode == 0
    assert done.stdout == "0 0 2 2 127.0.0.1 --flag two words\n"
    lines = done.stderr.splitlines()
    assert "[rank 1] 1 1 2 2 127.0.0.1 --flag two words" in lines
    assert {"[rank 0] noted", "[rank 1] noted"} <= set(lines)


def test_lines_on_one_terminal_are_whole(launcher):
    """Each rank writes a line in two parts, as print() does without a buffer."""
    script = """
        import os, sys
        word = os.environ["RANK"] * 20
        for _ in range(300):
            os.write(1, word.encode())
            os.write(1, b"\\n")
    """
    path = launcher.folder / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    command = [sys.executable, "-m", "penstock", "run", *TWO, str(path)]
    made = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=True,
    )
    lines = made.stdout.splitlines()
    assert {line for line in lines if line} == {"0" * 20, f"[rank 1] {'1' * 20}"}
    assert len(lines) == 600


def test_one_rank_is_not_prefixed(launcher):
    done = launcher.run("import sys; print('noted', file=sys.stderr)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "noted\n")


def test_second_node_needs_an_endpoint(launcher):
    done = launcher.run("", "--nnodes", "2")
    assert done.returncode == 2
    assert "--rdzv-endpoint" in done.stderr


def test_two_nodes_meet_at_the_endpoint(launcher):
    endpoint = f"127.0.0.1:{free_port()}"
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank")
    nodes = [launcher.start(script, *options, str(node)) for node in range(2)]
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert outputs == ["0 0 2\n", "1 0 2\n"]


def test_first_failure_is_reported_last(launcher):
    script = """
    here = pathlib.Path(__file__).parent
    (here / f"pid{rank}").write_text(str(os.getpid()))
    meet()
    if rank == 1:
        print("the true reason", file=sys.stderr)
        sys.exit(7)
    while psutil.pid_exists(int((here / "pid1").read_text())):
        time.sleep(0.01)
    print("a follow-up error", file=sys.stderr)
    sys.exit(9)
    """
    script = MEET + "import psutil\n" + textwrap.dedent(script)
    done = launcher.run(script, "--nproc", "3")
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    assert lines[-2:] == [
        "penstock run: rank 1 failed first, with exit code 7; the last 1 lines it wrote to stderr:",
        "  the true reason",
    ]
    assert "[rank 2] a follow-up error" in lines


def test_killed_rank_names_signal_and_memory(launcher):
    script = "meet()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    done = launcher.run(MEET + script, *TWO)
    assert done.returncode == 128 + signal.SIGKILL
    last = done.stderr.splitlines()[-1]
    assert "rank 1 was killed by signal 9 (SIGKILL); its peak memory was" in last


def test_rank_that_ignores_everything_is_killed(launcher):
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    meet()
    if rank == 0:
        sys.exit(3)
    time.sleep(600)
    """
    done = launcher.run(MEET + textwrap.dedent(script), *TWO, "--grace-s", "0")
    assert done.returncode == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_launcher_ends_all(launcher, signum):
    process = launcher.start(MEET + "meet(); print('met', flush=True); time.sleep(600)\n", *TWO)
    assert process.stdout.readline() == "met\n"
    process.send_signal(signum)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signum
    assert err.splitlines()[-1] == f"penstock run: stopped by {signum.name}"


def test_killed_launcher_takes_its_ranks_along(launcher):
    process = launcher.start(MEET + "meet(); print('met', flush=True); time.sleep(600)\n", *TWO)
    assert process.stdout.readline() == "met\n"
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=240)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
