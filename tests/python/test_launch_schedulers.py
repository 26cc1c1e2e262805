"""The same script under torchrun, mpirun, srun and `penstock run`'s back ends of them, unedited."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import one_node_slurm
import psutil
import pytest

# Trains on two ranks; the launcher's variables are all it knows.
TRAINS = """
import os, torch, penstock
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
engine = penstock.initialize(model, {"strategy": "zero3"})
rank = torch.distributed.get_rank()
for step in range(2):
    engine.backward(engine(torch.full((2, 8), 1.0 + rank)).square().mean())
    engine.step()
weights = engine.state_dict()
total = f"{sum(w.sum().item() for w in weights.values()):.6f}" if weights else ""
said = f"rank {rank} of {torch.distributed.get_world_size()} {total}\\n"
os.write(1, said.encode())  # at once: ranks may write to one file
engine.close()
"""
# Says what it was given; rank 1 fails once the other one is there, which waits to be ended.
FAILS = """
import os, pathlib, sys, time
names = {"RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")}
rank = next(os.environ[name] for name in names["RANK"] if name in os.environ)
os.write(1, f"got {rank} {os.environ['FROM_FILE']} {sys.argv[1:]}\\n".encode())
here = pathlib.Path(__file__).parent
(here / f"pid{rank}").write_text(str(os.getpid()))
while len(list(here.glob("pid*"))) < 2:
    time.sleep(0.01)
if rank == "1":
    sys.exit(7)
time.sleep(600)
"""
WAITS = """
import os, pathlib, time
(pathlib.Path(__file__).parent / f"pid{os.getpid()}").write_text(str(os.getpid()))
time.sleep(600)
"""
ODD = ["two words", "a'b\"c", "$HOME;echo no"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCHER = [sys.executable, "-m", "penstock", "run"]


@pytest.fixture(scope="module")
def slurm():
    if reason := one_node_slurm.why_not():
        pytest.skip(reason)
    try:
        with one_node_slurm.one_node_slurm() as env:
            yield env
    except one_node_slurm.CannotRun as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def mpi():
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (openmpi-bin)")
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=240)
    if "Open MPI" not in said.stdout:
        pytest.skip(f"mpirun is another one: {said.stdout[:80]}")
    return AS_ROOT if os.geteuid() == 0 else {}


def start(folder: pathlib.Path, words: list[str], env: dict[str, str]):
    """Runs a command in the folder, outside of whatever this session is part of."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | env | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def alive(path: pathlib.Path) -> bool:
    """Whether the process in the file runs."""
    try:
        return psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sums(said: str) -> dict[str, str]:
    return dict(re.findall(r"rank (\d) of 2 ?(\S*)", said))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the two ranks print under `penstock run`."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "train.py").write_text(TRAINS, encoding="utf-8")
    code, said = start(folder, [*LAUNCHER, "--nproc", "2", "train.py"], {})
    assert code == 0, said
    found = sums(said)
    assert set(found) == {"0", "1"} and found["0"]
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_a_script_trains_under(launcher, expected, tmp_path, request):
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    env = {}
    script = [sys.executable, "train.py"]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = [*torchrun, "--nproc-per-node", "2", "train.py"]
    elif launcher == "mpirun":
        env = request.getfixturevalue("mpi")
        words = ["mpirun", "-n", "2", "--host", "localhost:2", "--bind-to", "none", *script]
    else:
        env = request.getfixturevalue("slurm")
        words = ["srun", "--quiet", "--ntasks", "2", *script]
    code, said = start(tmp_path, words, env)
    assert code == 0, said
    assert sums(said) == expected


@pytest.mark.parametrize("launcher", ["openmpi", "slurm"])
def test_a_failing_rank_ends_all_with_its_code(launcher, tmp_path, request):
    env = request.getfixturevalue("slurm" if launcher == "slurm" else "mpi")
    (tmp_path / "fails.py").write_text(FAILS, encoding="utf-8")
    (tmp_path / "env").write_text("FROM_FILE=x y; $z\n", encoding="utf-8")
    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    words = [*LAUNCHER, "--launcher", launcher, "--env_file", "env", "--force_multi"]
    words += ["--hostfile", "hosts", "fails.py", *ODD]
    code, said = start(tmp_path, words, env)
    assert code == 7, said
    assert {f"got {rank} x y; $z {ODD}" for rank in (0, 1)} <= set(said.splitlines())
    deadline = time.monotonic() + 60  # the scheduler's daemon ends them
    while any(map(alive, tmp_path.glob("pid*"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("launcher", ["openmpi", "slurm"])
def test_a_killed_launcher_leaves_nothing(launcher, tmp_path, request):
    env = request.getfixturevalue("slurm" if launcher == "slurm" else "mpi")
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    words = [*LAUNCHER, "--launcher", launcher, "-H", "hosts", "--force_multi", "waits.py"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 240
    while len([path for path in tmp_path.glob("pid*") if path.stat().st_size]) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=240)
    deadline = time.monotonic() + 60
    while left := [path for path in tmp_path.glob("pid*") if alive(path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_slurm_starts_a_launcher_on_each_node(slurm, tmp_path):
    """One task of srun is `penstock run`, which finds its node and the endpoint by itself."""
    (tmp_path / "say.py").write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))",
        encoding="utf-8",
    )
    words = ["srun", "--quiet", "--ntasks", "1", *LAUNCHER, "--nproc", "2", "say.py"]
    code, said = start(tmp_path, words, slurm)
    assert code == 0, said
    assert sorted(line[-13:] for line in said.splitlines()) == ["0 2 127.0.0.1", "1 2 127.0.0.1"]
