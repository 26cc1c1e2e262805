"""examples/serve_weights.py: every version is verified by the reader, and either side may be
killed."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.timeout(240)
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "serve_weights.py"


def lines_of(*options: str) -> tuple[subprocess.Popen[str], Iterator[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    running = subprocess.Popen(
        [*command, "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
         str(EXAMPLE), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    limit = threading.Timer(120, running.kill)
    limit.daemon = True
    limit.start()
    assert running.stdout is not None
    return running, iter(running.stdout.readline, "")


def until(text: str, lines: Iterator[str]) -> list[str]:
    seen = []
    for line in lines:
        seen.append(line)
        if re.search(text, line):
            return seen
    raise AssertionError(f"no line with {text!r}: {seen}")


def process(name: str, seen: list[str]) -> int:
    found = re.search(rf"{name}: process (\d+)", "".join(seen))
    assert found, seen
    return int(found[1])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_every_version_arrives(strategy):
    running, lines = lines_of("--strategy", strategy)
    seen = "".join(lines)
    assert running.wait() == 0, seen
    found = re.findall(r"version (\d+) has (\d+) tensors, loss ([\d.]+)", seen)
    assert [(step, count) for step, count, _ in found] == [("3", "41"), ("6", "41"), ("9", "41")]
    losses = [float(loss) for _, _, loss in found]
    assert losses == sorted(losses, reverse=True)


def test_a_killed_reader_is_done_without():
    running, lines = lines_of("--steps", "40", "--every", "1")
    seen = until("version 3 has", lines)
    os.kill(process("reader", seen), signal.SIGKILL)
    seen = "".join(lines)
    assert running.wait() == 0, seen
    assert "trainer: the reader ended; training goes on without it" in seen
    assert "trainer: 40 steps" in seen


def test_a_killed_trainer_leaves_a_whole_version():
    running, lines = lines_of("--steps", "100000", "--every", "1")
    seen = until("version 3 has", lines)
    os.kill(process("trainer", seen), signal.SIGKILL)
    seen = "".join(lines)
    assert running.wait() != 0
    kept = re.search(r"the trainer ended too early; the model keeps version (\d+)", seen)
    assert kept and int(kept[1]) >= 3, seen
