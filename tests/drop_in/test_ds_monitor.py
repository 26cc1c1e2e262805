"""DeepSpeed's monitors: what its config says is written, and what is not."""

from __future__ import annotations

import csv
import pathlib
import re
import subprocess
import sys

import monitors
import pytest
import wandb_files
from monitors import config_of, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock._native import _penstock
from penstock.monitor.deepspeed_config import SECTIONS, get_monitor_config

pytestmark = pytest.mark.timeout(480)
UPDATES = 4
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}
NAMES = {"loss": "train_loss", "lr": "lr", "scale": "loss_scale"}


def sections(folder, *names, job="job"):
    made = {"enabled": True, "output_path": str(folder), "job_name": job}
    return dict.fromkeys(names, made)


def in_csv(folder):
    """(samples, value) by the file's name; the first line is checked."""
    found = {}
    for path in pathlib.Path(folder).glob("*.csv"):
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["step", path.stem.removeprefix("Train_Samples_")]
        found[path.stem] = [(int(samples), float(value)) for samples, value in rows]
    return found


def in_tensorboard(folder):
    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag.replace("/", "_"): [(one.step, one.value) for one in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def expected(told, *kinds):
    """Of what each rank saw; a loss is the mean over ranks, and not known of a skipped step."""
    by_rank = [one["loss"] for one in told]
    means = [None if None in one else sum(one) / len(one) for one in zip(*by_rank, strict=True)]
    seen = told[0] | {"loss": means}
    return {
        f"Train_Samples_{NAMES[kind]}": [
            (samples, pytest.approx(value, rel=1e-6))
            for samples, value in zip(told[0]["samples"], seen[kind], strict=True)
            if value is not None
        ]
        for kind in kinds
    }


@pytest.mark.parametrize("native", [False, True], ids=["deepspeed", "penstock"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run(world, parts, native, drop_in_pools, tmp_path):
    config = config_of(
        **sections(tmp_path / "a", "csv_monitor", "tensorboard"),
        scheduler=WARMUP,
        gradient_accumulation_steps=parts,
    )
    told = drop_in_pools(world).run(train, config, UPDATES, native)
    wanted = expected(told, "loss", "lr")
    assert in_csv(tmp_path / "a/job") == wanted
    assert in_tensorboard(tmp_path / "a/job") == wanted
    names = sorted(path.name for path in tmp_path.rglob("*.*"))
    assert names[:2] == ["Train_Samples_lr.csv", "Train_Samples_train_loss.csv"]
    assert len(names) == 3 and names[2].startswith("events.out.tfevents.")


def test_rates_are_those_of_deepspeed(drop_in_pools, tmp_path):
    config = config_of(
        **sections(tmp_path, "csv_monitor"), scheduler=WARMUP, gradient_accumulation_steps=2
    )
    drop_in_pools(2).run(train, config, 3)
    # What DeepSpeed 0.19.8 wrote of this config.
    written = "step,lr\r\n8,0.0\r\n16,0.0038685280723454152\r\n24,0.006131471927654584\r\n"
    text = (tmp_path / "job/Train_Samples_lr.csv").read_bytes().decode()
    ours, theirs = (re.split("[,\r\n]+", one.strip()) for one in (text, written))
    assert ours[:4] == theirs[:4] and text.count("\r\n") == 4
    assert [float(one) for one in ours[2:]] == pytest.approx([float(one) for one in theirs[2:]])


@pytest.mark.parametrize("native", [False, True], ids=["deepspeed", "penstock"])
def test_fp16(native, drop_in_pools, tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 24}
    config = config_of(**sections(tmp_path, "csv_monitor"), fp16=fp16)
    told = drop_in_pools(2).run(train, config, 12, native)
    found = in_csv(tmp_path / "job")
    wanted = expected(told, "loss", "lr", "scale")
    assert found["Train_Samples_loss_scale"] == wanted["Train_Samples_loss_scale"]
    assert found["Train_Samples_lr"] == wanted["Train_Samples_lr"]
    losses = [
        (at, pytest.approx(one.expected, rel=1e-3))
        for at, one in wanted["Train_Samples_train_loss"]
    ]
    assert found["Train_Samples_train_loss"] == losses
    assert 0 < len(losses) < 12  # some were skipped


def test_a_pipeline(drop_in_pools, tmp_path):
    config = config_of(**sections(tmp_path, "csv_monitor"), gradient_accumulation_steps=2)
    told = drop_in_pools(2).run(monitors.train_stages, config, 3)
    at = [4, 8, 12]
    assert in_csv(tmp_path / "job") == {
        "Train_Samples_train_loss": list(zip(at, told[0]["loss"], strict=True)),
        "Train_Samples_lr": list(zip(at, told[0]["lr"], strict=True)),
        "Train_Samples_eval_loss": [(12, told[0]["eval"])],
    }
    assert told[0]["samples"] == 12 and told[0]["loss"] == told[1]["loss"]


def test_folders_where_none_is_said(drop_in_pools, tmp_path):
    on = {"enabled": True}
    config = config_of(csv_monitor=on, tensorboard=on)
    drop_in_pools(1).run(train, config, 1, False, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    assert len(list((tmp_path / "DeepSpeedJobName").iterdir())) == 3


def test_a_run_goes_on_in_its_files(drop_in_pools, tmp_path):
    config = config_of(**sections(tmp_path, "csv_monitor"))
    first = drop_in_pools(1).run(train, config, 2)
    again = drop_in_pools(1).run(train, config, 1)
    lr = [(2, first[0]["lr"][0]), (4, first[0]["lr"][1]), (2, again[0]["lr"][0])]
    assert in_csv(tmp_path / "job")["Train_Samples_lr"] == lr


OFF = [{}, {"enabled": False}]


@pytest.mark.parametrize("native", [False, True], ids=["deepspeed", "penstock"])
@pytest.mark.parametrize("section", OFF, ids=str)
def test_off(section, native, drop_in_pools, tmp_path):
    given = dict.fromkeys(SECTIONS, section)
    drop_in_pools(1).run(train, config_of(**given), 1, native, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_events_by_hand(drop_in_pools, tmp_path):
    zero, one = drop_in_pools(2).run(monitors.by_hand, str(tmp_path))
    assert zero["enabled"] and one["enabled"]
    assert zero["places"] == [True, True, False, False] and one["places"] == [False] * 4
    assert not (tmp_path / "1").exists()
    folder = tmp_path / "0" / "job"
    assert (folder / "My_metric_name.csv").read_bytes() == b"step,metric name\r\n7,2.5\r\n9,3.5\r\n"
    assert (folder / "plain.csv").read_bytes() == b"step,plain\r\n8,1\r\n"
    assert in_tensorboard(folder)["My_metric name"] == [(7, 2.5), (9, 3.5)]
    assert len(zero["said"]) == 1 and "not written" in zero["said"][0] and one["said"] == []


def test_a_place_by_itself(drop_in_pools, tmp_path):
    zero, one = drop_in_pools(2).run(monitors.one_by_one, str(tmp_path))
    assert zero == {
        "text": "step,b\n3,1.5\n",
        "names": ["a_b"],
        "writer": "SummaryWriter",
        "kind": True,
    }
    assert one == {"log_dir": None, "writer": "NoneType"}
    assert in_tensorboard(tmp_path / "DeepSpeedJobName") == {"a_b": [(3, 1.5)]}


def test_wandb_without_a_key(drop_in_pools, tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    section = {"enabled": True, "project": "mine", "group": "ours", "team": "theirs"}
    told = drop_in_pools(1).run(
        monitors.with_wandb, config_of(wandb=section), UPDATES, str(tmp_path)
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    (run,) = {
        (one.run.project, one.run.run_group, one.run.entity)
        for one in wandb_files.messages(file)
        if one.run.project
    }
    assert run == ("mine", "ours", "theirs")
    wanted = expected(told, "loss", "lr")
    for name, rows in wanted.items():
        tag = name.replace("_", "/", 2)
        found = [(one["_step"], one[tag]) for one in wandb_files.rows(file) if tag in one]
        assert found == rows


def test_a_wandb_run_of_the_script_stays_open(drop_in_pools, tmp_path):
    config = config_of(wandb={"enabled": True})
    ((left, told),) = drop_in_pools(1).run(monitors.with_a_run, config, str(tmp_path))
    assert left  # and can be logged to
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = [one["Train/Samples/lr"] for one in wandb_files.rows(file) if "Train/Samples/lr" in one]
    assert found == told["lr"]


def test_comet(drop_in_pools):
    section = {"enabled": True, "samples_log_interval": 4, "project": "p", "experiment_name": "e"}
    ((told, calls),) = drop_in_pools(1).run(
        monitors.with_comet, config_of(comet=section | {"mode": "create"}), 5
    )
    none = dict.fromkeys(("api_key", "workspace", "experiment_key", "online"))
    assert calls[0] == ("start", none | {"project": "p", "mode": "create"})
    assert calls[1] == ("name", "e") and calls[-1] == ("end",)
    every = [0, 2, 4]  # samples 2, 6, 10
    assert [one for one in calls if one[0] == "Train/Samples/lr"] == [
        ("Train/Samples/lr", told["lr"][at], told["samples"][at]) for at in every
    ]
    losses = [one[1:] for one in calls if one[0] == "Train/Samples/train_loss"]
    assert losses == [(pytest.approx(told["loss"][at]), told["samples"][at]) for at in every]


MISSING = [
    ("tensorboard", ("tensorboard",), "pip install tensorboard"),
    ("wandb", ("wandb",), "pip install wandb"),
    ("comet", ("comet_ml",), "pip install .comet_ml>=3.41.0"),
]


@pytest.mark.parametrize("native", [False, True], ids=["deepspeed", "penstock"])
@pytest.mark.parametrize(("section", "hidden", "says"), MISSING, ids=str)
def test_a_library_that_is_not_there(section, hidden, says, native, drop_in_pools, tmp_path):
    config = config_of(**{section: {"enabled": True}})
    for said in drop_in_pools(2).run(monitors.raised, config, native, hidden):
        assert section in said and re.search(says, said)


def test_an_old_comet(drop_in_pools):
    (said,) = drop_in_pools(1).run(monitors.with_old_comet, config_of(comet={"enabled": True}))
    assert "3.41.0" in said and "3.1.0" in said


WRONG = [
    ({"csv_monitor": {"enabled": "maybe"}}, "csv_monitor.enabled"),
    ({"csv_monitor": {"output_pth": "x"}}, "csv_monitor.output_pth"),
    ({"tensorboard": {"job_name": 3}}, "tensorboard.job_name"),
    ({"wandb": {"group": 3}}, "wandb.group"),
    ({"comet": {"samples_log_interval": "ten"}}, "comet.samples_log_interval"),
    ({"comet": {"mode": "update"}}, "get_or_create"),
    ({"comet": {"online": 2}}, "comet.online"),
]


@pytest.mark.parametrize("native", [False, True], ids=["deepspeed", "penstock"])
@pytest.mark.parametrize(("change", "says"), WRONG, ids=str)
def test_wrong_values(change, says, native, drop_in_pools):
    (said,) = drop_in_pools(1).run(monitors.raised, config_of(**change), native, ())
    assert says in said


def test_a_slow_disk_holds_nobody_up(drop_in_pools, tmp_path):
    config = config_of(**sections(tmp_path, "csv_monitor"))
    ((told, steps, waited),) = drop_in_pools(1).run(monitors.with_a_slow_disk, config)
    assert steps == [False] * 5 and waited == [True] * 5
    assert in_csv(tmp_path / "job") == expected([told], "loss", "lr")


def test_a_bad_disk_is_one_warning(drop_in_pools, tmp_path):
    config = config_of(**sections(tmp_path, "csv_monitor", "tensorboard"))
    file = str(tmp_path / "job/Train_Samples_lr.csv")
    ((told, said),) = drop_in_pools(1).run(monitors.with_a_bad_disk, config, file)
    assert len(said) == 1 and "csv_monitor failed" in said[0]
    assert in_tensorboard(tmp_path / "job") == expected([told], "loss", "lr")


def test_a_folder_that_cannot_be_made(drop_in_pools, tmp_path):
    (tmp_path / "job").write_text("")
    config = config_of(**sections(tmp_path, "csv_monitor"))
    (said,) = drop_in_pools(1).run(monitors.raised, config, False, ())
    assert f'cannot create the folder "{tmp_path}/job"' in said


SCRIPT = """
import penstock.deepspeed; penstock.deepspeed.install()
import deepspeed, sys, torch
section = {"enabled": True, "output_path": sys.argv[1], "job_name": "job"}
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
model = torch.nn.Linear(4, 1)
config |= {"csv_monitor": section, "tensorboard": section}
engine = deepspeed.initialize(model=model, config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
"""


def test_a_script_that_just_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for found in (in_csv(tmp_path / "job"), in_tensorboard(tmp_path / "job")):
        assert {name: [at for at, _ in rows] for name, rows in found.items()} == {
            "Train_Samples_train_loss": [2, 4, 6],
            "Train_Samples_lr": [2, 4, 6],
        }


@pytest.mark.parametrize("section", SECTIONS)
def test_the_translator_knows_the_keys(section):
    config = getattr(get_monitor_config({section: {"enabled": "off"}}), section)
    known = [key for key, fate, _ in _penstock.deepspeed_keys() if fate == "taken"]
    keys = [f"{section}.{key}" for key in vars(config)]
    assert keys == [one for one in known if one.startswith(f"{section}.")]
