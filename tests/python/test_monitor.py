"""monitor: metrics, where they are written, and what goes wrong there."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
import torch
import wandb_files
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import penstock
from penstock.monitor import console, flops, monitored, run

STEPS = 5


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def train(config, steps=STEPS, before=None, accumulate=1):
    """The rows of each step, and what was computed by hand of the same."""
    engine = penstock.initialize(
        model(),
        {"strategy": "zero2", "optimizer": {"lr": 0.25, "type": "SGD"}} | config,
        batch={"accumulate": accumulate},
    )
    if before is not None:
        before(engine)
    rows, own = [], []
    torch.manual_seed(penstock.front.ranks.rank())
    for _ in range(steps):
        losses = []
        for _ in range(accumulate):
            loss = engine(torch.randn(4, 64)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        rows.append(engine.metrics)
        own.append((sum(losses) / accumulate, engine.grad_norm))
    engine.close()
    return rows, own


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_what_the_loop_saw(world, accumulate, pools):
    told = pools(world).run(train, {}, STEPS, None, accumulate)
    for index in range(STEPS):
        rows = [rows[index] for rows, _ in told]
        mean = sum(own[index][0] for _, own in told) / world
        for row, (_, own) in zip(rows, told, strict=True):
            assert row["step"] == index + 1
            assert row["loss"] == pytest.approx(mean, rel=1e-6)
            assert row["grad_norm"] == own[index][1]
            assert (row["lr"], row["samples"], row["tokens"]) == (
                0.25,
                4 * world * accumulate,
                None,
            )
            assert row["samples_per_s"] == pytest.approx(row["samples"] / row["step_s"])
            assert 0.0 <= row["exposed_comm_s"] <= row["exposed_s"] <= row["step_s"]
            assert (row["comm_bytes"] > 0) == (world > 1)
            assert row["mfu"] is None  # nobody asked for it, so nothing was counted


def test_one_folder_is_one_engines(tmp_path):
    config = {"monitor": {"path": str(tmp_path)}}
    first = penstock.initialize(model(), config)
    with pytest.raises(penstock.ConfigError, match="to which another open engine writes"):
        penstock.initialize(model(), config)
    first.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')  # of a run that was killed
    again = penstock.initialize(model(), config)
    again.backward(again(torch.randn(4, 64)).square().mean())
    again.step()
    again.close()
    assert [row["step"] for row in run.rows(tmp_path / "metrics.jsonl")] == [1]


def test_a_callback_that_ends_the_thread_does_not(tmp_path):
    engine = penstock.initialize(model(), {})
    engine.on_step(lambda row: sys.exit(3))
    seen = []
    engine.on_step(seen.append)
    with pytest.warns(RuntimeWarning, match="on_step failed and gets no more rows.*SystemExit: 3"):
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 64)).square().mean())
            engine.step()
        engine.close()
    assert [row["step"] for row in seen] == [1, 2, 3]
    with pytest.raises(penstock.RuntimeFault, match="the engine is closed"):
        engine.on_step(seen.append)
    with pytest.raises(penstock.ConfigError, match="cannot be called"):
        penstock.initialize(model(), {}).on_step(5)


def test_a_script_that_ends_without_a_word_loses_no_row(tmp_path):
    script = """
import time, torch, penstock
engine = penstock.initialize(torch.nn.Linear(4, 4), {"monitor": {"console": "lines"}})
seen = []
engine.on_step(lambda row: (time.sleep(0.02), print("row", row["step"], flush=True)))
for step in range(20):
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == [word for step in range(1, 21) for word in ("row", str(step))]
    assert done.stderr.count("step ") == 20


def test_the_lr_of_an_optimizer_of_ones_own():
    net = model()
    own = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    engine = penstock.initialize(net, {"strategy": "zero2"}, optimizer=own, lr_scheduler=schedule)
    seen = []
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
        seen.append(engine.metrics["lr"])
    engine.close()
    assert seen == [0.5, 0.25, 0.125]


def test_files(tmp_path):
    rows, _ = train({"monitor": {"path": str(tmp_path / "a" / "b"), "formats": ["jsonl", "csv"]}})
    written = [json.loads(line) for line in (tmp_path / "a/b/metrics.jsonl").open()]
    assert [row.keys() for row in written] == [row.keys() for row in rows]
    for row, seen in zip(written, rows, strict=True):
        assert row == pytest.approx(seen)
        assert row["mfu"] > 0
    with (tmp_path / "a/b/metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == pytest.approx([row["loss"] for row in rows])
    assert table[0]["tokens"] == ""
    about = json.loads((tmp_path / "a/b/run.json").read_text())
    assert about["strategy"] == "zero2" and about["ranks"] == 1
    assert about["config"]["optimizer"]["lr"] == 0.25
    assert "norm" in about["plan"]["update"] and about["predicted"]["total"] > 0


def test_every(tmp_path):
    seen = []
    train(
        {"monitor": {"path": str(tmp_path), "every": 2}},
        before=lambda engine: engine.on_step(lambda row: seen.append(row["step"])),
    )
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert steps == seen == [2, 4]


def test_tensorboard_is_read_by_its_own_library(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
        EventAccumulator,
    )

    rows, _ = train({"monitor": {"path": str(tmp_path), "formats": ["tensorboard"]}})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    told = [(one.step, one.value) for one in read.Scalars("train/loss")]
    assert told == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wandb_is_read_by_its_own_messages(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, _ = train({"monitor": {"path": str(tmp_path), "formats": ["wandb"]}})
    wandb_files.flush()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    told = [one for one in wandb_files.rows(file) if "train/loss" in one]
    losses = {one["train/step"]: one["train/loss"] for one in told}
    assert losses == {row["step"]: pytest.approx(row["loss"]) for row in rows}


def test_a_slow_callback_holds_nobody_up():
    go, seen = threading.Event(), []

    def slow(row):
        go.wait(240)
        seen.append(row["step"])

    settings = {"strategy": "zero2", "optimizer": {"lr": 0.25, "type": "SGD"}}
    engine = penstock.initialize(model(), settings)
    engine.on_step(slow)
    for _ in range(5):
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
    assert seen == []
    go.set()
    engine.close()
    assert seen == [1, 2, 3, 4, 5]


def test_a_callback_that_raises_is_one_warning():
    def bad(row):
        raise ValueError(f"no {row['step']}")

    with pytest.warns(RuntimeWarning, match="on_step failed .*ValueError: no 1") as caught:
        train({}, before=lambda engine: engine.on_step(bad))
    assert len(caught) == 1


def test_a_full_disk_is_one_line(tmp_path, capfd):
    rows, _ = train(
        {"monitor": {"path": str(tmp_path), "formats": ["jsonl"]}},
        before=lambda engine: (tmp_path / "metrics.jsonl").symlink_to("/dev/full"),
    )
    assert len(rows) == STEPS
    said = [line for line in capfd.readouterr().err.splitlines() if "metrics.jsonl" in line]
    assert len(said) == 1 and "training continues" in said[0]


SCRIPT = """
import sys, torch, penstock
engine = penstock.initialize(torch.nn.Linear(8, 8), {"monitor": {"path": sys.argv[1]}})
while True:
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    print(engine.steps, flush=True)
"""


def test_a_killed_run_leaves_whole_rows(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    rows = tmp_path / "run/metrics.jsonl"
    try:
        # A thread writes the rows; on a loaded machine it may be many of these short steps late.
        while int(run.stdout.readline()) < 50 or rows.read_bytes().count(b"\n") < 40:
            pass
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()
    steps = [json.loads(line)["step"] for line in rows.open()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 40


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ({"formats": ["cvs"]}, 'did you mean "csv"'),
        ({"formats": ["csv"]}, 'no effect without "monitor.path"'),
        ({"trace_first": 2}, 'no effect without "monitor.path"'),
        ({"every": 0}, "a whole number of steps >= 1"),
        ({"path": "/proc/none"}, '"monitor.path" is "/proc/none"'),
        ({"path": "x", "events": 0, "trace_first": 2}, "nothing is recorded"),
        ({"console": "bars"}, 'did you mean "bar"'),
    ],
)
def test_refused(monitor, expected):
    with pytest.raises(penstock.ConfigError) as error:
        penstock.initialize(model(), {"monitor": monitor})
    assert expected in str(error.value)


def test_the_console(capfd):
    train({"monitor": {"console": "auto"}})
    lines = [one for one in capfd.readouterr().err.splitlines() if one.startswith("step ")]
    assert len(lines) == STEPS
    assert lines[0].startswith("step      1  loss ") and "samples/s" in lines[0]
    assert "MFU" in lines[0]
    assert console.amount(12345.0) == "12.3k" and console.amount(None) == ""


IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
FAMILIES = {
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=3, n_head=4)
    ),
    "Llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ),
    "OPT": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=96,
            hidden_size=48,
            ffn_dim=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=48,
        )
    ),
    "BERT": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
        )
    ),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=96,
            d_model=48,
            d_kv=12,
            d_ff=96,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_torchs_counter(family):
    """Three times our forward is torch's forward and backward: nothing below the first matrix needs
    a gradient of its input, and attention in torch's fused form adds a recomputation, so both are
    made alike here: eager attention."""
    made = FAMILIES[family]()
    made.set_attn_implementation("eager")
    with flops.Counter() as ours:
        made(input_ids=IDS, labels=IDS)
    theirs = FlopCounterMode(display=False)
    with theirs:
        made(input_ids=IDS, labels=IDS).loss.backward()
    assert 3 * ours.total == pytest.approx(theirs.get_total_flops(), rel=0.01)
    # The fused form computes the same model.
    made.set_attn_implementation("sdpa")
    with flops.Counter() as fused:
        made(input_ids=IDS, labels=IDS)
    assert fused.total == pytest.approx(ours.total, rel=0.01)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"input_ids": torch.zeros(3, 7, dtype=torch.long)}, (3, 21)),
        ([{"x": torch.zeros(5, 2)}], (5, 0)),
        ({"labels": torch.zeros(9, 9).long(), "input_ids": torch.zeros(2, 4).long()}, (2, 8)),
        ([torch.zeros(6, 3, 8, 8), torch.zeros(6).long()], (6, 0)),
        ([torch.zeros(())], (1, 0)),
        ([3, "x"], (0, 0)),
    ],
)
def test_samples_and_tokens(given, expected):
    assert monitored.batch_size(given) == expected


def test_evaluations_count_for_nothing():
    engine = penstock.initialize(model(), {"strategy": "zero3"})
    for _ in range(2):
        with torch.no_grad():
            engine(torch.randn(7, 64))
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
    assert engine.metrics["samples"] == 4
    engine.zero_grad()
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.zero_grad()  # what was dropped is of no step
    engine.backward(engine(torch.randn(2, 64)).square().mean())
    engine.step()
    assert engine.metrics["samples"] == 2
    engine.close()


def test_nothing_of_it_is_left(tmp_path):
    before = threading.active_count()
    train(
        {"monitor": {"path": str(tmp_path), "console": "lines"}},
        before=lambda engine: engine.on_step(lambda row: None),
    )
    tasks = [one.read_text() for one in pathlib.Path("/proc/self/task").glob("*/comm")]
    assert threading.active_count() == before
    assert not any("monitor" in one for one in tasks)
