"""examples/train_3d.py with tiny settings: what a user sees of ranks that compute one model."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "train_3d.py")
TINY = "--width 64 --seq 32 --steps 6 --log-every 2 --micro-batches 4".split()
LINE = re.compile(r"^ +(\d+) +(\d+\.\d+) +\d+\.\d+ +\S+e-\d\d +\d+$", re.MULTILINE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    book = tmp_path_factory.mktemp("text") / "book.txt"
    book.write_text("never odd or even\n" * 500, encoding="utf-8")
    return book


def train(text, *arguments, ranks, check=True):
    launcher = ["-m", "penstock", "run", "--nproc", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, *TINY, "--text", str(text), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert (done.returncode == 0) == check, done.stdout + done.stderr
    return done.stdout if check else done.stderr


def check_losses(output):
    told = [(int(step), float(loss)) for step, loss in LINE.findall(output)]
    assert [step for step, _ in told] == [1, 2, 4, 6]
    assert told[-1][1] < told[0][1]
    before, after = re.search(r"held-out loss (\S+) before training, (\S+)", output).groups()
    assert float(after) < float(before)
    assert "equal within 0.0001" in output


# rank, then predicted / measured of parameters, gradients, optimizer and total, and the RSS
MEMORY = re.compile(r"^(\d+) +(?:(\d+\.\d+) / +(\d+\.\d+) +){4,5}\d+$", re.MULTILINE)


def test_four_ranks_show_stages_order_and_memory(text):
    output = train(text, "--layers", "2", ranks=4)
    check_losses(output)
    assert "data 1 x tensor 2 x pipeline 2" in output
    assert re.search(r"^0 +token, blocks.0 +([\d,]+) +([\d,]+)$", output, re.M)
    assert re.search(r"^1 +blocks.1, head +", output, re.M)
    assert re.search(r"^every stage +norm, position +", output, re.M)
    assert "rank 2 to 3: stage 1, " in output
    picture = re.findall(r"^pipeline rank \d +([^|\n]+)$", output, re.M)
    assert [row.split() for row in picture] == [
        "F0 F1 . B0 F2 B1 F3 B2 . B3".split(),
        ". F0 B0 F1 B1 F2 B2 F3 B3 .".split(),
    ]
    assert "20.0 % of these slots; (P - 1) / (m + P - 1) is 20.0 %" in output
    measured = re.findall(r"^pipeline rank \d \|([0-3a-d.]{72})\|$", output, re.M)
    assert len(measured) == 2 and all(set("0123abcd") <= set(row) for row in measured)
    assert [found[1] for found in MEMORY.finditer(output)] == list("0123")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_llama_with_virtual_stages_and_disk(device, text):
    options = "--model llama --layers 4 --strategy zero3 --offload disk --schedule interleaved"
    output = train(text, *options.split(), "--device", device, ranks=2)
    check_losses(output)
    assert "rank 0: stage 0, 2, " in output
    assert re.search(r"^pipeline rank 0 +0F0 +0F1 +2F0 +2F1", output, re.M)
    assert "on disk" in output


def test_one_rank_has_no_pipeline(text):
    output = train(text, "--layers", "1", ranks=1)
    check_losses(output)
    assert "no pipeline" in output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor", "2"], "are not the 1 ranks of this run"),
        (["--schedule", "gpipe"], "--pipeline is 1"),
        (["--demo", "--model", "llama"], "--demo chooses --model"),
    ],
)
def test_options_without_effect_are_refused(options, said, text):
    assert said in train(text, *options, ranks=1, check=False)
