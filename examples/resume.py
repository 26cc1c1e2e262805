"""Kills a training run and resumes it with one rank fewer; the loss is that of an unbroken run.

    python examples/resume.py

Starts examples/train_gpt.py on two ranks, which save as they train; kills all of them with SIGKILL;
starts it again on one rank, which loads what the two have saved; and compares the validation loss
with that of a run on two ranks that is not killed.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

TRAIN = pathlib.Path(__file__).with_name("train_gpt.py")
SIZE = "--layers 2 --width 64 --seq 64 --steps 60 --log-every 20 --save-every 10".split()
WINDOWS = 8  # per step, over all ranks
TOLERANCE = 1e-3  # nats per byte
WAIT_S = 60.0


def command(ranks: int, *arguments: str) -> list[str]:
    run = [sys.executable, "-m", "penstock", "run", "--nproc", str(ranks)]
    batch = ["--batch", str(WINDOWS // ranks), "--precision", "fp32"]
    return [*run, str(TRAIN), *SIZE, *batch, *arguments]


def loss_of(output: str) -> float:
    found = re.search(r"validation loss (\S+)", output)
    if found is None:
        raise SystemExit(f"no validation loss in:\n{output}")
    return float(found[1])


def train(ranks: int, *arguments: str) -> str:
    done = subprocess.run(command(ranks, *arguments), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def train_and_kill(folder: pathlib.Path) -> str:
    """Trains until a checkpoint exists, and kills the run. Returns the checkpoint's name."""
    latest = folder / "latest"
    with subprocess.Popen(
        command(2, "--checkpoint", str(folder)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        end = time.monotonic() + WAIT_S
        while not latest.exists() and run.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)  # its ranks die with it
    if not latest.exists():
        raise SystemExit(f"no checkpoint after {WAIT_S:g} s")
    return latest.read_text(encoding="utf-8").strip()


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        print(f"two ranks save as they train, and are killed: {train_and_kill(folder)} is whole")
        output = train(1, "--checkpoint", str(folder))
    print("one rank: " + re.search(r"going on from step \d+", output)[0])
    resumed, undisturbed = loss_of(output), loss_of(train(2))
    print(f"validation loss {resumed:.4f}; of two ranks without a kill {undisturbed:.4f}")
    if abs(resumed - undisturbed) > TOLERANCE:
        raise SystemExit(f"they differ by more than {TOLERANCE:g}")
    print(f"equal within {TOLERANCE:g}; {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
