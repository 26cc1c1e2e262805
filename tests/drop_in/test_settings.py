"""The classes of config sections read values as the config does; schedules have their values."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ACCEPTED = {
    "fp16 text": ("fp16", {"enabled": "yes", "loss_scale_window": "10"}, {"loss_scale_window": 10}),
    "fp16 off": ("fp16", {"loss_scale_window": 0}, {"loss_scale_window": 0, "enabled": False}),
    "fp16 fixed": ("fp16", {"loss_scale": "3", "min_loss_scale": -1}, {"loss_scale": 3}),
    "bf16": ("bf16", {"enabled": 1}, {"enabled": True, "check_grad_overflow": True}),
    "bucket": ("zero", {"prefetch_bucket_size": 3686.0}, {"prefetch_bucket_size": 3686}),
    "auto": ("zero", {"stage": 2, "reduce_bucket_size": "auto"}, {"reduce_bucket_size": 500000000}),
    "nested": ("zero", {"offload_param": {"device": "cpu"}}, {"stage": 0}),
    "offload": ("offload", {"device": "cpu", "ratio": "0.5"}, {"ratio": 0.5}),
    "own": ("own", {"number": "4", "flag": "off", "other_name": 2.5}, {"number": 4, "rate": 2.5}),
    "renamed": ("own", {"old": 3}, {"values": [3]}),
}  # fmt: skip
REFUSED = {
    "window": ("fp16", {"enabled": True, "loss_scale_window": 0}, "loss_scale_window"),
    "window flag": ("fp16", {"loss_scale_window": True}, "loss_scale_window"),
    "scale": ("fp16", {"loss_scale": -1}, "a number of at least 0"),
    "list": ("fp16", {"loss_scale": []}, "must be a number"),
    "section": ("fp16", {"loss_scale": {}}, "must be a number"),
    "infinite": ("fp16", {"loss_scale": float("inf")}, "loss_scale"),
    "unknown": ("fp16", {"los_scale": 1}, "did you mean"),
    "stage": ("zero", {"stage": 4}, "from 0 to 3"),
    "bucket": ("zero", {"reduce_bucket_size": 0}, "at least 1"),
    "part": ("zero", {"stage3_prefetch_bucket_size": 0.5}, "a whole number"),
    "ratio": ("offload", {"ratio": 1.5}, "from 0 to 1"),
    "device": ("offload", {"device": "gpu"}, "none"),
    "own number": ("own", {"number": "x"}, "allowed: int"),
    "own list": ("own", {"values": 3}, "allowed: list"),
    "own flag": ("own", {"flag": 2}, "allowed: bool"),
    "both names": ("own", {"old": 1, "values": [1]}, "the same key"),
}
SCRIPT = """
import json, sys
from typing import List, Optional
import penstock.deepspeed; penstock.deepspeed.install()
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig

class Field:
    def __init__(self, default=None, alias=None, **extra):
        self.default, self.alias, self.json_schema_extra = default, alias, extra

class Own(DeepSpeedConfigModel):
    number: int = 0
    flag: bool = False
    rate: float = Field(0.0, alias="other_name")
    old: int = Field(deprecated=True, new_param="values", new_param_fn=lambda one: [one])
    values: Optional[List[int]] = None

KINDS = {"fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, "zero": DeepSpeedZeroConfig,
         "offload": DeepSpeedZeroOffloadOptimizerConfig, "own": Own}
if sys.argv[1] == "pydantic":
    import pydantic_core

for kind, given in json.loads(sys.stdin.read()):
    try:
        found = KINDS[kind](**given).model_dump()
    except ValueError as error:
        found = [str(error), type(error).__name__]
    print("FOUND " + json.dumps(found))
"""


def found(cases: list[list[object]], *, beside: str = "") -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, beside],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


@pytest.fixture(scope="module")
def accepted():
    return dict(zip(ACCEPTED, found([[k, g] for k, g, _ in ACCEPTED.values()]), strict=True))


@pytest.fixture(scope="module")
def refused():
    return dict(zip(REFUSED, found([[k, g] for k, g, _ in REFUSED.values()]), strict=True))


@pytest.mark.parametrize("name", ACCEPTED)
def test_values_are_converted(name, accepted):
    for key, value in ACCEPTED[name][2].items():
        assert accepted[name][key] == value


@pytest.mark.parametrize("name", REFUSED)
def test_bounds_are_those_of_the_config(name, refused):
    text, kind = refused[name]
    assert REFUSED[name][2] in text
    assert kind in ("ConfigError", "DeepSpeedRefusal")


def test_errors_are_pydantics_if_it_is_in_use():
    pytest.importorskip("pydantic_core")
    kind, given, says = REFUSED["window"]
    ((text, name),) = found([[kind, given]], beside="pydantic")
    assert name == "ValidationError" and says in text
