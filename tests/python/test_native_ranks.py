"""The native trainer on processes that a launcher starts: the losses of its ranks as threads."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TREE = pathlib.Path(os.environ.get("PENSTOCK_TREE", ROOT / "build" / "release"))
TRAINER = TREE / "examples" / "cpp" / "train_gpt"
TINY = "--steps 11 --width 32 --layers 2 --digits 17".split()
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PLACES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_PROCID")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone"]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node"],
    "penstock run": [sys.executable, "-m", "penstock", "run", "--no-python", "--nproc"],
    "mpirun": ["mpirun", "--oversubscribe", "-n"],
}

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="the native trainer is not built")


def said(command, **environment):
    """What was printed, of a run that may fail."""
    places = {name: value for name, value in os.environ.items() if name not in PLACES}
    return subprocess.run(
        [str(one) for one in command],
        capture_output=True,
        text=True,
        env=places | {"OMP_NUM_THREADS": "1"} | AS_ROOT | environment,
        timeout=240,
    )


def losses(run):
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.findall(r"step +(\d+)  loss (\d+\.\d{17})  grad norm (\S+)", run.stdout)
    assert [step for step, *_ in found] == ["1", "11"]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_train_as_threads_do(ranks):
    threads = losses(said([TRAINER, *TINY, "--ranks", ranks]))
    for name, launcher in LAUNCHERS.items():
        if shutil.which(launcher[0]):
            assert losses(said([*launcher, ranks, TRAINER, *TINY])) == threads, name


def test_a_place_that_cannot_be_is_an_error():
    run = said([TRAINER, *TINY], RANK="2", WORLD_SIZE="2")
    assert run.returncode == 2
    assert "RANK is 2 and WORLD_SIZE is 2. Ranks must be 0 to 1" in run.stderr
    run = said([TRAINER, *TINY], RANK="x", WORLD_SIZE="2")
    assert 'RANK is "x"' in run.stderr


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text(
        f'#!/bin/sh\n[ "$RANK" = 1 ] && (sleep 2; kill -9 $$) &\nexec {TRAINER} "$@"\n'
    )
    victim.chmod(0o755)
    run = said([*LAUNCHERS["penstock run"], 2, victim, "--steps", 100000, "--width", 32])
    assert run.returncode != 0
    assert "rank 1 is dead or stopped" in run.stdout + run.stderr
