"""examples/train_gpt.py with tiny settings: what a user sees, alone and on two ranks."""

from __future__ import annotations

import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "train_gpt.py")
TINY = "--layers 2 --width 64 --seq 32 --steps 6 --log-every 2 --precision fp32".split()
LINE = re.compile(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+) +\S+e-\d\d +\d+ +\d+$", re.MULTILINE)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Sixty small files of words, of which a few become validation text, and one to skip."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    for i in range(60):
        text = " ".join(words.choice(("to", "be", "or", "not")) for _ in range(200))
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    (folder / "binary").write_bytes(b"\0" * 100)
    return folder


def train(*arguments, ranks=1):
    launcher = ["-m", "penstock", "run", "--nproc", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, *TINY, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(output):
    """(step, loss, grad norm) of each interval."""
    return [(int(s), float(loss), float(norm)) for s, loss, norm in LINE.findall(output)]


def test_two_ranks_report_what_one_reports(text_folder):
    alone = train("--data", text_folder, "--batch", 8, "--strategy", "ddp")
    sharded = train("--data", text_folder, "--batch", 4, "--strategy", "zero3", ranks=2)
    assert [step for step, *_ in lines(alone)] == [2, 4, 6]
    for one, two in zip(lines(alone), lines(sharded), strict=True):
        assert two == pytest.approx(one, abs=2e-3)
    losses = [float(re.search(r"validation loss (\S+)", out)[1]) for out in (alone, sharded)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0] < lines(alone)[0][1]
    for name in ("ddp", "zero1", "zero2", "zero3"):
        assert sharded.count(f"{name} predicted") == 2  # before training and after
    assert "zero3 measured" in sharded
    assert "sample after 'def '" in sharded
    ratio = float(re.search(r"measured / predicted +(\S+)", sharded)[1])
    assert ratio == pytest.approx(1.0, abs=0.1)


def test_file_config_and_time_limit(text_folder, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("never odd or even\n" * 500, encoding="utf-8")
    config = '{"strategy": "zero1", "batch": {"micro": 2, "accumulate": 2}}'
    output = train("--demo", "--data", book, "--minutes", "0", "--config", config)
    assert [step for step, *_ in lines(output)] == [2]
    assert "zero1 measured" in output
