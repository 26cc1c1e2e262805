"""The optimizers of test_optimizers_outside_step.py on every layout of the state: strategies by
node, tiers, fp16, tiles, and tensor, pipeline and sequence ranks."""

from __future__ import annotations

from typing import Any

import meshes
import pytest
import torch
from test_optimizers_outside_step import EXACT, WORLD, compared, sharded

HOST = {"optimizer": "host"}
# Name: strategy, precision, the rest of the config.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hpz": ("hpz", "bf16", {"mesh": {"node": 2}}),
    "hpz_host": ("hpz_host", "fp32", {"mesh": {"node": 1}}),
    "mics": ("mics", "bf16", {"mesh": {"node": 2}}),
    "mics in a node": ("mics", "fp32", {"mesh": {"node": 1}}),
    "ddp on the host": ("ddp", "bf16", {"offload": HOST}),
    "zero1 on the host": ("zero1", "bf16", {"offload": HOST}),
    "zero2 gradients": ("zero2", "bf16", {"offload": HOST | {"gradients": "host"}}),
    "zero3 on the host": ("zero3", "bf16", {"offload": HOST | {"params": "host"}}),
    "zero3 on disk": ("zero3", "bf16", {"offload": HOST | {"params": "disk"}}),
    "zero3 late": ("zero3", "bf16", {"offload": HOST | {"late_update": True}}),
    "zero1 fp16": ("zero1", "fp16", {}),
    "zero3 fp16": ("zero3", "fp16", {"offload": HOST}),
}


# Every layout with two of the optimizers.
PAIRS = [(name, one) for i, one in enumerate(LAYOUTS) for name in list(EXACT)[i % 2 :: 2]]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_all_ranks_see_what_plain_torch_gives(name, layout, pools, tmp_path):
    strategy, precision, more = LAYOUTS[layout]
    if "disk" in more.get("offload", {}).values():
        more = more | {"offload": more["offload"] | {"path": str(tmp_path)}}
    args = (name, strategy, precision, str(tmp_path), more)
    compared(name, precision, pools(WORLD).run(sharded, *args))


# ---- tensor, pipeline and sequence ranks

SEQUENCE = meshes.Case((("sequence", 2),), "zero3", "llama", "one")


def states(name: str, optimizer: Any, train: Any) -> Any:
    """Yields after each call and after some steps on it."""
    _, begin, show, go_on = EXACT[name]
    for action, steps in ((begin, range(3)), (show, range(0)), (go_on, range(3, 6))):
        action(optimizer)
        yield
        for step in steps:
            train(step)
        if steps:
            yield


def on_sequences(name: str, path: str) -> list[dict[str, torch.Tensor]]:
    import penstock  # noqa: PLC0415

    case = SEQUENCE
    model = meshes.MODELS[case.model][0]()
    config = case.config(path)
    del config["optimizer"]
    engine = penstock.initialize(model, config, optimizer=EXACT[name][0](model.parameters()))

    def train(step: int) -> None:
        engine.train_batch(meshes.parts_of(case, step, engine.data_rank))

    looks = states(name, engine.optimizer, train)
    seen = [engine.state_dict(rank0_only=False) for _ in looks]
    engine.close()
    return seen


def in_one_process(name: str) -> list[dict[str, torch.Tensor]]:
    model = meshes.MODELS[SEQUENCE.model][0]()
    optimizer = EXACT[name][0](model.parameters())

    def train(step: int) -> None:
        optimizer.zero_grad()
        for part in meshes.parts_of(SEQUENCE, step, 0):
            meshes.loss_of(model(**part)).backward()
        optimizer.step()

    return [
        {name: one.detach().clone() for name, one in model.named_parameters()}
        for _ in states(name, optimizer, train)
    ]


@pytest.mark.parametrize("name", EXACT)
def test_sequence_ranks(name, pools, tmp_path):
    theirs = in_one_process(name)
    for seen in pools(WORLD).run(on_sequences, name, str(tmp_path)):
        for ours, expected in zip(seen, theirs, strict=True):
            for key, value in expected.items():
                assert torch.allclose(ours[key], value, rtol=1e-4, atol=1e-5), key


# Features that do not run a user-defined optimizer yet.
NOT_YET: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"mesh": {"tensor": 2}}, '"mesh.tensor" is 2: an optimizer of your own'),
    "pipeline": (
        {"mesh": {"pipeline": 2}, "batch": {"accumulate": 2}},
        '"mesh.pipeline" is 2: an optimizer of your own',
    ),
    "disk": ({"offload": {"optimizer": "disk"}}, 'Set offload.optimizer to "host"'),
}


def started(name: str, more: dict[str, Any]) -> str:
    import penstock  # noqa: PLC0415

    model = meshes.MODELS["mlp"][0]()
    config = {"strategy": "zero1", "parallel": {"rules": meshes.RULES}, "comm": {"timeout_s": 120}}
    optimizer = EXACT[name][0](model.parameters())
    try:
        penstock.initialize(model, config | more, optimizer=optimizer)
    except penstock.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", NOT_YET)
def test_refused_at_initialize(layout, pools):
    more, words = NOT_YET[layout]
    for told in pools(WORLD).run(started, "schedule-free", more):
        assert words in told, told
