"""Effects of config keys beyond numbers: folders that are made, sections of pipelines."""

from __future__ import annotations

import pathlib
from typing import Any

import pipe_models as pipes
import pytest
import torch
from ranks import Failure

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def trained(offload: dict[str, Any], built_in_init: bool) -> float:
    """Returns the loss after two steps with a section of offload."""
    ds = pipes.deepspeed()
    config = CONFIG | {"zero_optimization": {"stage": 3, **offload}}
    torch.manual_seed(0)
    if built_in_init:
        with ds.zero.Init(config_dict_or_path=config):
            model = torch.nn.Linear(4, 4)
    else:
        model = torch.nn.Linear(4, 4)
    engine = ds.initialize(model=model, config=config)[0]
    for _ in range(2):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return float(loss)


def offload_to(key: str, path: str) -> dict[str, Any]:
    return {key: {"device": "nvme", "nvme_path": path, "buffer_count": "4", "pin_memory": "off"}}


@pytest.mark.parametrize(
    ("key", "built_in_init"),
    [("offload_optimizer", False), ("offload_param", False), ("offload_param", True)],
)
def test_a_missing_folder_is_made(key, built_in_init, drop_in_pools, tmp_path):
    folder = tmp_path / "some" / "folder"
    losses = drop_in_pools(2).run(trained, offload_to(key, str(folder)), built_in_init)
    assert losses == drop_in_pools(2).run(trained, {}, False)
    assert folder.is_dir() and not list(folder.rglob("*.*"))


@pytest.mark.parametrize("built_in_init", (False, True))
def test_a_folder_that_cannot_be_made_is_an_error(built_in_init, drop_in_pools, tmp_path):
    (tmp_path / "file").write_text("")
    offload = offload_to("offload_param", str(tmp_path / "file" / "folder"))
    for failed in drop_in_pools(2).attempt(trained, offload, built_in_init):
        assert isinstance(failed, Failure) and failed.is_a("ConfigError"), failed
        assert "this folder cannot be made: Not a directory" in failed.text


def quantized(stage: int) -> tuple[float, str, list[bool]]:
    """The loss after two steps, the engine's explanation, and what the methods return."""
    ds = pipes.deepspeed()
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    config = CONFIG | {"zero_optimization": {"stage": stage, **keys}}
    engine = ds.initialize(model=model, config=config)[0]
    for step in range(2):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    text = engine.native.explain()
    said = [engine.zero_quantized_weights(), engine.zero_quantized_gradients()]
    engine.destroy()
    return float(loss), text, said


def test_quantized_exchanges_round_at_stage_3_only(drop_in_pools):
    wires = ("all_gather(data:int8/128)", "reduce_scatter(data:int8/128/stochastic)")
    exact, text, said = drop_in_pools(2).run(quantized, 2)[0]
    assert not any(wire in text for wire in wires)
    rounded, text, _ = drop_in_pools(2).run(quantized, 3)[0]
    assert all(wire in text for wire in wires)
    assert said == [True, True]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def fed_back(changes: dict[str, Any]) -> tuple[list[float], str]:
    """The losses of eight steps, and the engine's explanation."""
    ds = pipes.deepspeed()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    engine = ds.initialize(model=model, config=CONFIG | changes)[0]
    losses = []
    for step in range(8):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    text = engine.native.explain()
    engine.destroy()
    return losses, text


FED_BACK: dict[str, tuple[dict[str, Any], str, str]] = {
    "loco": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
            }
        },
        "grad=int4/128/nearest",
        "residual rest=PP@device:bf16",
    ),
    "one bit": (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 3}}},
        "grad=sign/128",
        "residual rest=PP@device:bf16",
    ),
    "zero one": (
        {
            "optimizer": {
                "type": "ZeroOneAdam",
                "params": {"lr": 1e-3, "var_update_scaler": 3, "local_step_scaler": 8},
            }
        },
        "grad=sign/128",
        "residual rest=PP@device:bf16",
    ),
}


@pytest.mark.parametrize(("changes", "wire", "residual"), FED_BACK.values(), ids=FED_BACK)
def test_error_feedback_trains_like_exact_exchanges(changes, wire, residual, drop_in_pools):
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    exact, _ = drop_in_pools(2).run(fed_back, adam)[0]
    found, text = drop_in_pools(2).run(fed_back, adam | changes)[0]
    assert wire in text and residual in text
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)


def loss_of_pipeline(section: dict[str, Any]) -> float:
    ds = pipes.deepspeed()
    model = pipes.built("modules", num_stages=2, activation_checkpoint_interval=1)
    engine = ds.initialize(model=model, config=pipes.config_of(pipeline=section))[0]
    losses = [float(engine.train_batch(pipes.batches("modules", 0, 0))) for _ in range(2)]
    engine.destroy()
    return losses[-1]


def test_use_reentrant_changes_nothing(drop_in_pools):
    losses = [
        drop_in_pools(2).run(loss_of_pipeline, {"use_reentrant": how} if how is not None else {})
        for how in (None, True, False)
    ]
    assert losses[0] == losses[1] == losses[2]


MODES = {"": [True, False], "Ignore": [False, False], "WARN": [True, False], "fail": [True, True]}


def tags(folder: str) -> dict[str, list[Any]]:
    """Saves under one tag and under a tag of each rank; returns what the engine says, by mode."""
    ds = pipes.deepspeed()
    told: dict[str, list[Any]] = {}
    for mode in MODES:
        config = CONFIG | ({"checkpoint": {"tag_validation": mode}} if mode else {})
        engine = ds.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
        engine.save_checkpoint(folder, f"one{mode}")
        told[mode] = [
            engine.checkpoint_tag_validation_enabled(),
            engine.checkpoint_tag_validation_fail(),
        ]
        try:
            engine.save_checkpoint(folder, f"{mode}of{torch.distributed.get_rank()}")
            told[mode].append(sorted(one.name for one in pathlib.Path(folder).glob(f"{mode}of*")))
        except ValueError as error:
            told[mode].append(str(error))
        engine.destroy()
    return told


def test_tags(drop_in_pools, tmp_path):
    """A tag of each rank is an error in the mode "fail"; else all ranks save under rank 0's."""
    for told in drop_in_pools(2).run(tags, str(tmp_path)):
        for mode, says in MODES.items():
            assert told[mode][:2] == says
            if mode == "fail":
                assert "failof0, failof1. Pass the same tag on every rank" in told[mode][2]
            else:
                assert told[mode][2] == [f"{mode}of0"]


class Table(torch.nn.Module):
    """A layer, a table in fp32 and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.full((4,), 1 / 3))
        self.register_buffer("counts", torch.ones(4, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.frequencies


def dtypes_after(config: dict[str, Any], built_in_init: bool) -> list[str]:
    """Returns the dtypes of frequencies, statistics and counts after a step."""
    ds = pipes.deepspeed()
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    with ds.zero.Init(config_dict_or_path=CONFIG | config, enabled=built_in_init):
        model = Table()
    engine = ds.initialize(model=model, config=CONFIG | config)[0]
    engine.backward(engine(torch.randn(2, 4, dtype=dtype)).float().square().mean())
    engine.step()
    found = [model.frequencies, model.norm.running_mean, model.norm.running_var, model.counts]
    told = [str(one.dtype).removeprefix("torch.") for one in found]
    engine.destroy()
    return told


BF16 = {"bf16": {"enabled": True}}
LOW, FULL, LONG = "bfloat16", "float32", "int64"


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        ({**BF16}, [FULL, LOW, LOW, LONG]),
        ({**BF16, "data_types": {"buffer_dtype": None}}, [FULL, LOW, LOW, LONG]),
        ({**BF16, "data_types": {"buffer_dtype": "bf16"}}, [LOW, LOW, LOW, LONG]),
        ({**BF16, "data_types": {"buffer_dtype": "torch.bfloat16"}}, [LOW, LOW, LOW, LONG]),
        ({"data_types": {"buffer_dtype": "bf16"}}, [FULL, FULL, FULL, LONG]),  # has no effect
        (
            {
                **BF16,
                "data_types": {"buffer_dtype": "bf16"},
                "penstock": {"dtypes": {"freq*": "fp32"}},
            },
            [FULL, LOW, LOW, LONG],
        ),
    ],
)
def test_buffer_dtype(config, dtypes, stage, drop_in_pools):
    """As in DeepSpeed, the key casts all floating buffers, if fp16 or bf16 is enabled."""
    config = config | {"zero_optimization": {"stage": stage}}
    for told in drop_in_pools(2).run(dtypes_after, config, stage == 3):
        assert told == dtypes


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.other = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.body(x)).square().mean()


def trained_by(heads: list[str], stage: int, ignore: bool | None) -> list[str]:
    """Trains windows of two micro-batches, with the named heads; returns what their steps raised.

    "rank": rank 0 uses head "one" and rank 1 head "other".
    """
    ds = pipes.deepspeed()
    section = {} if ignore is None else {"ignore_unused_parameters": ignore}
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage, **section}}
    engine = ds.initialize(model=TwoHeads(), config=CONFIG | config)[0]
    told = []
    for head in heads:
        own = ("one", "other")[torch.distributed.get_rank()] if head == "rank" else head
        try:
            engine.backward(engine(torch.ones(2, 4), own))
            engine.step()
            told.append("")
        except AssertionError as error:
            told.append(error.args[0])
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters(stage, drop_in_pools):
    """With the key set to false, a step fails if a parameter got no gradient in its window."""
    heads = ["one", "one", "one", "other", "rank", "rank", "other", "other"]
    for told in drop_in_pools(2).run(trained_by, heads, stage, False):
        assert [bool(one) for one in told] == [False, True, *[False] * 5, True]
        assert "other.weight, other.bias" in told[1] and "one.weight, one.bias" in told[-1]
        assert '"zero_optimization.ignore_unused_parameters" is false' in told[1]
        assert "in step 1 " in told[1] and "in step 3 " in told[-1]


@pytest.mark.parametrize(("stage", "ignore"), [(2, True), (2, None), (0, False), (3, False)])
def test_unused_parameters_are_ignored(stage, ignore, drop_in_pools):
    told = drop_in_pools(2).run(trained_by, ["one", "one"], stage, ignore)
    assert told == [["", ""]] * 2
