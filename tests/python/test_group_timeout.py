"""An engine waits for a peer as long as torch's default group, unless its config says it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch import nn

import penstock
from penstock.front import ranks

HOURS = 7200
OF_GLOO = 1800.0  # torch's own


@contextlib.contextmanager
def default_group(timeout_s: float | None, backend: str | None = "gloo"):
    """torch's default process group, of this process alone."""
    given = {} if timeout_s is None else {"timeout": datetime.timedelta(seconds=timeout_s)}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **given)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def waits_s(config=None, **overrides) -> float:
    engine = penstock.initialize(nn.Linear(2, 2), config, **overrides)
    try:
        return engine.config.comm.timeout_s
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("group_s", "config", "expected"),
    [
        (3, None, 600.0),
        (600, None, 600.0),
        (601.5, None, 601.5),
        (HOURS, None, float(HOURS)),
        (None, None, OF_GLOO),
        (HOURS, {"comm": {}}, float(HOURS)),
        (HOURS, {"comm": None}, float(HOURS)),
        (HOURS, {"comm": {"warn_s": 1, "timeout_s": None}}, float(HOURS)),
        (HOURS, {"comm": {"timeout_s": 30}}, 30.0),
        (HOURS, {"comm": {"timeout_s": 600}}, 600.0),
        (3, {"comm": {"timeout_s": 9000}}, 9000.0),
        (1e12, None, 1e9),  # the largest value of the key
        (HOURS, json.dumps({"comm": {"warn_s": 1}}), float(HOURS)),
        (HOURS, {"train_batch_size": 1}, float(HOURS)),  # a DeepSpeed config
        (HOURS, {"train_batch_size": 1, "penstock": {"comm": {"timeout_s": 30}}}, 30.0),
    ],
)
def test_the_longer_timeout_unless_the_config_has_one(group_s, config, expected):
    with default_group(group_s):
        assert waits_s(config) == expected


def test_the_other_keys_of_the_section_stay():
    with default_group(HOURS):
        engine = penstock.initialize(nn.Linear(2, 2), {"comm": {"warn_s": 1, "bucket_bytes": 0}})
    comm = engine.config.comm
    assert (comm.timeout_s, comm.warn_s, comm.bucket_bytes) == (HOURS, 1.0, 0)
    engine.close()


def test_overrides_count_as_the_config():
    with default_group(HOURS):
        assert waits_s(comm={"timeout_s": 30}) == 30.0
        with pytest.raises(penstock.ConfigError, match='"comm" is '):
            waits_s(comm=[])


def test_without_a_group_the_default_stays():
    assert not dist.is_initialized()
    assert waits_s() == 600.0


@pytest.mark.parametrize("backend", ["cpu:gloo", "penstock", None])
def test_every_back_end_tells_its_timeout(backend):
    with default_group(HOURS, backend):
        assert waits_s() == HOURS


def test_a_wrapped_back_end_tells_its_timeout():
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with default_group(HOURS):
            assert waits_s() == HOURS
    finally:
        dist.set_debug_level(level)


@pytest.mark.parametrize("backend", ["gloo", "penstock"])
def test_a_timeout_that_was_set_later_counts(backend):
    with default_group(3, backend) as group:
        group.set_timeout(datetime.timedelta(seconds=HOURS))
        assert waits_s() == HOURS


class Silent(dist.ProcessGroup):
    """A process group in Python, whose timeout nobody can ask for."""

    def __init__(self, *_: object) -> None:
        super().__init__(0, 1)


def test_a_group_that_does_not_tell_is_named(monkeypatch):
    dist.Backend.register_backend("silent", Silent, devices=["cpu"])
    with default_group(HOURS, "silent"):
        assert waits_s() == 600.0  # alone, it waits for nobody
        monkeypatch.setattr(ranks, "world", lambda: 2)
        told = r'"silent"\) does not report its timeout, so the engine .* 600 s .*"comm.timeout_s"'
        with pytest.warns(UserWarning, match=told):
            assert ranks.default_timeout_s() == 600.0


@pytest.mark.parametrize(("given", "expected"), [({}, float(HOURS)), ({"timeout_s": 5.0}, 5.0)])
def test_sharded_construction_waits_as_long(given, expected, monkeypatch):
    made = []

    class Told(ranks.Ranks):
        def __init__(self, waits, *others):
            made.append(waits.timeout_s)
            super().__init__(waits, *others)

    monkeypatch.setattr(ranks, "Ranks", Told)
    with default_group(HOURS):
        with penstock.init(**given):
            model = nn.Linear(2, 2)
        penstock.initialize(model).close()
    assert made == [expected, float(HOURS)]


def _late(config, late_s):
    """Rank 1 begins its step `late_s` seconds after rank 0."""
    engine = penstock.initialize(nn.Linear(4, 4), {"strategy": "zero2"} | config)
    if dist.get_rank() == 1:
        time.sleep(late_s)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.close()
    return engine.config.comm.timeout_s


def test_ranks_wait_as_the_group_or_the_config_says(pools):
    assert pools(2).run(_late, {}, 2.5) == [OF_GLOO, OF_GLOO]
    first, _ = pools(2).attempt(_late, {"comm": {"timeout_s": 1}}, 2.5)
    assert first.is_a("RuntimeFault") and "lost a peer" in first.text, first


def _other_group_timeout():
    group = dist.group.WORLD
    group.set_timeout(datetime.timedelta(seconds=HOURS + dist.get_rank()))
    try:
        waits_s()
    finally:
        group.set_timeout(datetime.timedelta(seconds=OF_GLOO))


def test_ranks_with_other_timeouts_are_an_error(pools):
    for one in pools(2).attempt(_other_group_timeout):
        assert one.is_a("RuntimeFault") and "timeout_s" in one.text, one


SCRIPT = """
import datetime, json, os, sys, warnings
import torch, torch.distributed as dist
import deepspeed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}

def waits_s(**more):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG | more)[0]
    found = engine.native.config.comm.timeout_s
    engine.destroy()
    return found

def case(start, **more):
    try:
        start()
        return waits_s(**more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("DEEPSPEED_TIMEOUT", None)
        if dist.is_initialized():
            dist.destroy_process_group()

def hours(**given):
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(hours=2), **given)

def minutes(text, start=deepspeed.init_distributed):
    os.environ["DEEPSPEED_TIMEOUT"] = text
    start()

def existing():
    deepspeed.init_distributed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hours()
        found["said"] = [str(one.message) for one in said]

def accelerate():
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=False)
    handler = InitProcessGroupKwargs(backend="gloo", timeout=datetime.timedelta(hours=2))
    Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[handler])

def trainer(**given):
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments
    AcceleratorState._reset_state(True)
    config = CONFIG | {"train_micro_batch_size_per_gpu": "auto"}
    # with use_cpu=True Transformers drops ddp_timeout
    made = TrainingArguments(output_dir=sys.argv[1], deepspeed=config, **given)
    assert made.device.type == "cpu"

found = {}
found |= {
    "nothing": case(lambda: None),
    "default": case(deepspeed.init_distributed),
    "2 h": case(hours),
    "2 h, config": case(hours, penstock={"comm": {"timeout_s": 30}}),
    "3 s": case(lambda: deepspeed.init_distributed(timeout=datetime.timedelta(seconds=3))),
    "not a timedelta": case(lambda: deepspeed.init_distributed(timeout=0)),
    "minutes": case(lambda: minutes("90")),
    "minutes, at initialize": case(lambda: minutes("90", lambda: None)),
    "minutes, and 2 h": case(lambda: minutes("90", hours)),
    "zero.Init": case(lambda: minutes("90", deepspeed.zero.Init)),
    "no minutes": [case(lambda: minutes(text)) for text in ("2h", "", "0", "-1", "9" * 5000)],
    "existing": case(existing),
    "accelerate": case(accelerate),
    "trainer": case(lambda: trainer(ddp_timeout=5400)),
    "trainer's default": case(trainer),
}
print("FOUND", json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drop_in")
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    env = {name: str(value) for name, value in place.items()}
    env |= {"MASTER_ADDR": "127.0.0.1", "PENSTOCK_AS_DEEPSPEED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=os.environ | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", 600.0),
        ("default", 600.0),
        ("2 h", float(HOURS)),
        ("2 h, config", 30.0),
        ("3 s", 600.0),
        ("minutes", 5400.0),
        ("minutes, at initialize", 5400.0),
        ("minutes, and 2 h", float(HOURS)),
        ("zero.Init", 5400.0),
        ("existing", 600.0),
        ("accelerate", float(HOURS)),
        ("trainer", 5400.0),
        ("trainer's default", 1800.0),
    ],
)
def test_the_drop_in_waits_as_deepspeeds_group(name, expected, found):
    assert found[name] == expected


def test_the_drop_in_names_a_timeout_without_effect(found):
    (said,) = found["said"]
    assert said.startswith("[deepspeed::init_distributed] timeout=2:00:00 has no effect")
    assert "600 s" in said and '"comm.timeout_s"' in said
    assert "timedelta" in found["not a timedelta"]
    assert "DEEPSPEED_TIMEOUT='2h' is not a number of minutes" in found["no minutes"][0]
    assert all(one.startswith("ConfigError: [deepspeed::init_dis") for one in found["no minutes"])
