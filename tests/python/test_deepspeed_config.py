"""A config of DeepSpeed: the same losses as DeepSpeed's, in each form that it may be given in."""

from __future__ import annotations

import base64
import json
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trained
from test_api import initialize

import penstock
from penstock.cli import main

DEEPSPEED = pathlib.Path(trained.__file__).parent / "deepspeed"
TOOL = pathlib.Path(__file__).parents[2] / "tools" / "deepspeed_page.py"
SMALL = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def train(case):
    torch.manual_seed(0)
    model = trained.Model()
    optimizer = torch.optim.AdamW(trained.groups(model), **trained.GROUPS)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, **trained.SCHEDULE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = initialize(model, trained.config(case), optimizer=optimizer, lr_scheduler=schedule)
    losses = []
    for step in range(trained.BEFORE + trained.AFTER):
        loss = engine(trained.batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses[trained.BEFORE :]


@pytest.mark.parametrize("case", trained.CASES)
def test_losses_are_those_of_deepspeed(case, pools):
    losses = torch.tensor(pools(2).run(train, case)).mean(0)
    wanted = torch.tensor(json.loads((DEEPSPEED / case / "next.json").read_text())["losses"])
    near = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 5e-3}[case.partition("-")[2]]
    assert torch.allclose(losses, wanted, rtol=near), (losses, wanted)


def forms(folder):
    text = json.dumps(SMALL)
    path = folder / "ds.json"
    path.write_text("// of a tutorial\n" + text)
    return [SMALL, text, path, str(path), base64.urlsafe_b64encode(text.encode()).decode()]


def test_every_form_is_read(tmp_path):
    for form in forms(tmp_path):
        engine = initialize(torch.nn.Linear(4, 4), form)
        assert engine.config.strategy == "zero2"
        assert engine.config.batch.micro == 2
        engine.close()


def test_what_frameworks_leave_in():
    config = SMALL | {"steps_per_print": float("inf"), "train_batch_size": "auto", "amp": None}
    config["zero_optimization"] = {"stage": 3, "reduce_bucket_size": "auto"}
    with pytest.warns(UserWarning, match="steps_per_print") as said:
        engine = initialize(torch.nn.Linear(4, 4), config)
    assert len(said) == 1
    engine.close()


def test_auto_that_is_left_over_is_listed():
    config = SMALL | {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
    says = 'bf16.enabled, gradient_accumulation_steps: still "auto"'
    with pytest.warns(UserWarning, match=says):
        engine = initialize(torch.nn.Linear(4, 4), config)
    assert engine.config.precision is None
    engine.close()


def test_keys_with_a_dot_are_listed():
    config = SMALL | {"zero_optimization.stage": 3, "zero_optimization.sub_group_size": 3686.4}
    with pytest.warns(UserWarning, match="sub_group_size: not a DeepSpeed key: write it inside"):
        engine = initialize(torch.nn.Linear(4, 4), config)
    assert engine.config.strategy == "zero2"
    engine.close()


@pytest.mark.parametrize("text", ['// x\n{"bf16": {}, "bf16": {}}', '{"fp16": {"a": 1, "a": 2}}'])
def test_a_key_that_is_given_twice_is_refused(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(penstock.ConfigError, match="is in the config twice"):
        initialize(torch.nn.Linear(4, 4), path)


def test_a_dict_may_have_paths_dtypes_and_numbers_of_numpy(tmp_path):
    offload = {"device": "nvme", "nvme_path": tmp_path}
    config = SMALL | {
        "train_micro_batch_size_per_gpu": np.int64(2),
        "gradient_clipping": np.float32(0.5),
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "tensor_parallel": {"dtype": torch.bfloat16},
    }
    with pytest.warns(UserWarning, match="tensor_parallel.dtype"):
        engine = initialize(torch.nn.Linear(4, 4), config)
    assert engine.config.offload.path == str(tmp_path)
    assert (engine.config.batch.micro, engine.config.clip) == (2, 0.5)
    engine.close()
    with pytest.raises(penstock.ConfigError, match='"a" is a set, which JSON cannot express'):
        initialize(torch.nn.Linear(4, 4), SMALL | {"my": {"a": {1}}})


@pytest.mark.parametrize("given", [1, "true", "on", 1.0])
def test_a_monitor_section_is_read_as_by_deepspeed(given, tmp_path):
    csv = {"enabled": given, "output_path": str(tmp_path), "job_name": "job"}
    engine = initialize(torch.nn.Linear(4, 4), SMALL | {"csv_monitor": csv})
    engine.close()
    with pytest.raises(penstock.ConfigError, match='"csv_monitor.enabled" is "x"; allowed: true'):
        initialize(torch.nn.Linear(4, 4), SMALL | {"csv_monitor": csv | {"enabled": "x"}})


def test_nothing_is_said_where_all_is_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = initialize(torch.nn.Linear(4, 4), SMALL)
    engine.close()


def test_errors_name_the_key():
    for change, says in [
        ({"scheduler": {"type": "Warmup", "params": {}}}, "scheduler.type"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage"),
        ({"strategy": "zero3"}, "one dialect"),
        ({"managed_gradient_accumulation": False}, r"Call engine.step\(force=True\) instead"),
        ({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}, '"dtypes" in the'),
    ]:
        with pytest.raises(penstock.ConfigError, match=says):
            initialize(torch.nn.Linear(4, 4), SMALL | change)


def test_explain(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SMALL | {"wall_clock_breakdown": False}))
    assert main(["explain", "--config", str(path), "--world", "4"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["batch"]["global"] == 8
    assert "zero_optimization.stage = 2: taken (strategy" in said.err
    assert "wall_clock_breakdown = false: no effect" in said.err


def test_the_page_is_up_to_date():
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
