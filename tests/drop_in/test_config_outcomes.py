"""Numbers, flags, nulls and sections of configs: read as DeepSpeed reads them, or refused.

config_outcomes.json has mutated configs and what DeepSpeed 0.19.8 made of them
(tests/weekly/deepspeed_configs.py --record).
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from config_outcomes import BATCH, DIFFERENCES, Difference, difference

HERE = pathlib.Path(__file__).parent
RECORDED = json.loads((HERE / "config_outcomes.json").read_text())
SUM = BATCH | {"gradient_allreduce_op": "sum"}
# A config, and a part of the error (None: it is accepted).
GIVEN = [
    # "auto" that no framework replaced, where DeepSpeed computes with the value
    (
        {"train_micro_batch_size_per_gpu": "auto"},
        '"train_micro_batch_size_per_gpu" is still "auto"',
    ),
    (BATCH | {"gradient_accumulation_steps": "auto"}, "write a number, or leave the key out"),
    (BATCH | {"gradient_clipping": "auto"}, '"gradient_clipping" is still "auto"'),
    (
        BATCH | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        '"optimizer.params.lr" is still "auto"',
    ),
    (
        BATCH | {"optimizer": {"type": "NAdam", "params": {"lr": "auto"}}},
        '"optimizer.params.lr" is still "auto"',
    ),
    (
        BATCH | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        '"scheduler.params.warmup_num_steps" is still "auto"',
    ),
    # "auto" in a section of pydantic is DeepSpeed's default
    (BATCH | {"zero_optimization": {"reduce_bucket_size": "auto"}}, None),
    (BATCH | {"fp16": {"enabled": "auto"}}, None),
    # TRL's key with a dot is no key of DeepSpeed
    (BATCH | {"zero_optimization.stage3_prefetch_bucket_size": 3686.4}, None),
    # the same number inside its section is an error in DeepSpeed, too
    (
        BATCH | {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 3686.4}},
        "allowed: a whole number of at least 0",
    ),
    # values that once ended in an error without a key
    (BATCH | {"zero_optimization": "auto"}, "a section {key: value}"),
    (BATCH | {"scheduler": 0.5}, "a section {key: value}"),
    (BATCH | {"optimizer": {"type": 3}}, '"optimizer.type" is 3; allowed: text'),
    # words of DeepSpeed's errors that scripts match
    (BATCH | {"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op"),
    (SUM | {"zero_optimization": {"stage": 2, "zenflow": {}}}, "not supported with ZenFlow"),
    (
        SUM | {"zero_optimization": {"stage": 1}, "compile": {"deepcompile": True}},
        "not supported with DeepCompile",
    ),
    (SUM | {"zero_optimization": {"stage": 3}}, "not supported with ZeRO stage 3"),
]


def outcomes(configs):
    done = subprocess.run(
        [sys.executable, HERE / "config_outcomes.py"],
        input="".join(json.dumps(one) + "\n" for one in configs),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    return [json.loads(line.removeprefix("OUTCOME ")) for line in lines]


@pytest.fixture(scope="module")
def found():
    examples = [BATCH | one.example for one in DIFFERENCES]
    return outcomes([one["config"] for one in RECORDED] + [one for one, _ in GIVEN] + examples)


def test_mutated_configs_are_read_as_by_deepspeed(found):
    assert len(RECORDED) == 100
    bad = []
    for theirs, ours in zip(RECORDED, found, strict=False):
        said = difference(theirs, ours)
        if said is not None and not isinstance(said, Difference):
            bad.append((said, theirs["config"]))
    assert not bad, bad


@pytest.mark.parametrize("index", range(len(GIVEN)))
def test_given_configs(index, found):
    config, says = GIVEN[index]
    ours = found[len(RECORDED) + index]
    assert "crash" not in ours, (config, ours)
    if says is None:
        assert "values" in ours, (config, ours)
    else:
        assert says in ours.get("error", ""), (config, ours)


@pytest.mark.parametrize("index", range(len(DIFFERENCES)))
def test_documented_differences(index, found):
    """Tests Penstock's side only; the weekly command compares both."""
    one, ours = DIFFERENCES[index], found[len(RECORDED) + len(GIVEN) + index]
    assert one.reason
    if one.refuses == "penstock":
        assert re.search(one.error, ours["error"]), ours
    else:
        assert "values" in ours, ours
