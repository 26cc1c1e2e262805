"""`engine.config`: what is in effect, in typed sections that nobody can write to."""

from __future__ import annotations

import json

import models
import pytest
from training import Case

# Absent in a config's canonical JSON, by the numbers that say so in C++.
NOT_SET = {0, -1, None}


def start(case: Case, **others):
    import penstock  # noqa: PLC0415

    return penstock.initialize(models.build(case.model), case.config() | others)


def compare_section(section, values, path=""):
    for key, value in values.items():
        found = getattr(section, "global_" if key == "global" else key)
        where = f"{path}{key}"
        if isinstance(value, dict) and not isinstance(found, dict | list):
            compare_section(found, value, f"{where}.")
        elif where == "activations.checkpoint":
            assert value == {0: "none", 1: "unit"}.get(found, found)
        elif where == "dtypes":
            assert list(value.items()) == found
        else:
            assert found == value or (value is None and found in NOT_SET), where


EVERY_KEY = {
    "mesh": {"node": 1},
    "dtypes": {"*.norm*": "fp32"},
    "activations": {"checkpoint": 2},
    "optimizer": {"type": "SGD", "momentum": 0.9, "lr": 0.1},
    "schedule": {"type": "cosine", "warmup_steps": 2, "total_steps": 9},
    "tiling": {"loss_tokens": 8},
    "checkpoint": {"path": "/nowhere", "keep": 2, "signals": ["SIGUSR2"]},
    "monitor": {"every": 3, "console": "lines", "events": 64},
    "seed": 3,
}


@pytest.mark.parametrize("others", [{}, EVERY_KEY], ids=["defaults", "set"])
def test_every_setting_is_an_attribute(others):
    engine = start(Case("zero3", "bf16", 1, 1), **others)
    values = json.loads(engine.config.json())
    compare_section(engine.config, values)
    engine.close()


def test_config_has_what_follows_from_the_ranks_and_what_auto_became():
    batch = {"micro": 2, "global": 8}
    engine = start(Case("zero3", "fp32", 1, 1), batch=batch, offload="auto")
    assert engine.config.batch.accumulate == 4
    assert engine.config.mesh.data == 1
    assert engine.config.offload.optimizer in ("none", "host", "disk")
    engine.close()
    assert engine.config.strategy == "zero3"  # outlives the engine's memory


def test_config_is_read_only():
    engine = start(Case("zero3", "fp32", 1, 1))
    for section, key in ((engine.config, "clip"), (engine.config.offload, "params")):
        with pytest.raises(AttributeError):
            setattr(section, key, getattr(section, key))
    engine.close()


def test_explain_prints_every_value_for_so_many_ranks(tmp_path, capsys):
    from penstock import cli  # noqa: PLC0415

    file = tmp_path / "config.json"
    file.write_text(json.dumps({"clip": 0.5, "batch": {"micro": 2, "global": 16}}))
    assert cli.main(["explain", "--config", str(file), "--world", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('{\n  "activations": {\n    "checkpoint": "none"\n  },\n')
    values = json.loads(printed)
    assert (values["clip"], values["mesh"]["data"], values["batch"]["accumulate"]) == (0.5, 4, 2)
