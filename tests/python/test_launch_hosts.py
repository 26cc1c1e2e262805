"""penstock run over two hosts: they train together, and fail together, over ssh and pdsh.

The hosts are network namespaces of this machine (two_hosts.py).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import two_hosts

MARK = "PENSTOCK_TEST_MARK"  # carried to the hosts by its prefix
WHY_NOT = two_hosts.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "none")

# Sums over all ranks by gloo, and does so for ever or until one fails where it is told to wait.
SUMS = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
total = torch.tensor([2 ** rank])
dist.all_reduce(total)
names = "LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES FROM_FILE".split()
print(f"rank {rank} of {world}: {total.item()}", *(os.environ.get(n) for n in names), sys.argv[1:],
      flush=True)
(pathlib.Path(__file__).parent / f"pid{rank}").write_text(str(os.getpid()))
while "wait" in sys.argv:
    dist.all_reduce(total)
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""
# Needs no torch, and so starts at once.
WAITS = """
import os, pathlib, time
pid = pathlib.Path(__file__).parent / ("pid" + os.environ["RANK"])
pid.write_text(str(os.getpid()))
time.sleep(600)
"""
ODD = ["two words", "a'b\"c", "$HOME;echo no", "%h %n", "--flag=*"]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with two_hosts.two_hosts(tmp_path_factory.mktemp("network")) as ssh_args:
        yield ssh_args


class Run:
    """`penstock run` on the first host."""

    def __init__(self, folder: pathlib.Path, ssh_args: str):
        self.folder = folder
        self.mark = f"{folder}-{os.getpid()}"
        self.ssh_args = ssh_args
        (folder / "sums.py").write_text(SUMS, encoding="utf-8")
        (folder / "waits.py").write_text(WAITS, encoding="utf-8")
        (folder / "env").write_text("FROM_FILE='x y; $z'\n", encoding="utf-8")
        (folder / "hosts").write_text(
            "".join(f"{host} slots=2\n" for host in two_hosts.HOSTS), encoding="utf-8"
        )

    def start(self, *words: str, launcher: str = "ssh", options: tuple[str, ...] = ()):
        env = os.environ | {MARK: self.mark, "GLOO_SOCKET_IFNAME": two_hosts.LINK}
        env["PDSH_SSH_ARGS_APPEND"] = self.ssh_args
        given = ["--launcher-args", self.ssh_args] if launcher == "ssh" else []
        run = [sys.executable, "-m", "penstock", "run", "--hostfile", "hosts", "--env-file", "env"]
        run += ["--launcher", launcher, *given, "--grace-s", "1", *options]
        return subprocess.Popen(
            two_hosts.inside(two_hosts.HOSTS[0], *run, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=env,
        )

    def survivors(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for(self, ranks: int, process: subprocess.Popen) -> None:
        """Until so many ranks are there."""
        deadline = time.monotonic() + 240
        while len([p for p in self.folder.glob("pid*") if p.stat().st_size]) < ranks:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())


@pytest.fixture
def run(network, tmp_path):
    run = Run(tmp_path, network)
    yield run
    deadline = time.monotonic() + 60  # what a broken connection ends needs a moment
    while (left := run.survivors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left, f"outlived the run: {left}"


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ranks_of_both_hosts_sum(run, launcher):
    """Three ranks, two on the first host of the file and slot 1 of the other."""
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    chosen = f"{two_hosts.HOSTS[0]}@{two_hosts.HOSTS[1]}:1"
    process = run.start("sums.py", *ODD, launcher=launcher, options=("--include", chosen))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    expected = [
        f"rank {rank} of 3: 7 {place} x y; $z {ODD}"
        for rank, place in enumerate(("0 2 0,1", "1 2 0,1", "0 1 1"))
    ]
    assert sorted(re.findall(r"rank \d of 3: .*", out + err)) == expected
    if launcher == "ssh":
        assert out == expected[0] + "\n"
        assert "[rank 2] " + expected[2] in err.splitlines()


def test_a_killed_rank_ends_both_hosts(run):
    process = run.start("sums.py", "wait", options=("--num_gpus", "1"))
    run.wait_for(2, process)
    os.kill(run.pid(1), signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert "rank 1 was killed by signal 9 (SIGKILL)" in err
    assert not run.survivors()


def test_a_signal_ends_both_hosts(run):
    process = run.start("waits.py")
    run.wait_for(4, process)
    process.send_signal(signal.SIGINT)  # ip has become the launcher
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT, err
    assert err.splitlines()[-1] == "penstock run: stopped by SIGINT"
    assert not run.survivors()


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_killed_launcher_leaves_nothing(run, launcher):
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    process = run.start("waits.py", launcher=launcher)
    run.wait_for(4, process)
    process.kill()
    process.communicate(timeout=240)  # the fixture looks for survivors


def test_a_broken_connection_ends_the_run(run):
    process = run.start("waits.py")
    run.wait_for(4, process)
    clients = [
        child
        for child in psutil.Process(process.pid).children()
        if child.name() == "ssh" and two_hosts.HOSTS[1] in child.cmdline()
    ]
    assert len(clients) == 1
    clients[0].kill()
    _, err = process.communicate(timeout=240)
    assert process.returncode in (255, 128 + signal.SIGKILL), err
    assert not run.survivors()


def test_a_lost_host_is_done_without(run, request):
    """Elastic: the rank that is left starts again, alone."""
    if not request.config.getoption("full"):
        pytest.skip("torch's rendezvous takes its time: with --full")
    script = """
import os, pathlib, sys, time
here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
(here / ("pid" + rank)).write_text(str(os.getpid()))
other = here / f"pid{1 - int(rank)}"
while os.environ["WORLD_SIZE"] == "2":
    pid = other.read_text() if other.exists() else ""
    if pid and not os.path.exists("/proc/" + pid):
        sys.exit(5)
    time.sleep(0.05)
print("alone", sys.argv[1:], flush=True)
"""
    (run.folder / "elastic.py").write_text(script, encoding="utf-8")
    options = ("--num_gpus", "1", "--elastic_training", "--as-deepspeed")
    process = run.start("elastic.py", options=options)
    run.wait_for(2, process)
    nodes = [p for p in run.survivors() if "--end-with-stdin" in p.cmdline()]
    lost = [p for p in nodes if p.name() != "ssh" and "--node-rank 1" in " ".join(p.cmdline())]
    lost[0].kill()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "alone ['--local_rank=0']" in out
    assert "the run goes on without it" in err


def test_a_host_that_cannot_be_reached_is_named(run):
    (run.folder / "hosts").write_text("pst-b slots=1\npst-none slots=1\n", encoding="utf-8")
    words = [sys.executable, "-m", "penstock", "run", "-H", "hosts", "--launcher", "ssh"]
    done = subprocess.run(
        two_hosts.inside("pst-b", *words, "--launcher_args", run.ssh_args, "waits.py"),
        capture_output=True,
        text=True,
        cwd=run.folder,
        timeout=240,
    )
    assert done.returncode == 2
    assert "[launch::check_ssh] ssh without a password does not reach pst-none (" in done.stderr
    assert "pst-b (" not in done.stderr
