"""User-defined optimizers on a device: they step on shards there or on the host, and after their
methods outside step() the weights are those of plain torch."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import training
from test_optimizers_outside_step import EXACT, WORLD, Net, compared, inputs, of, sharded

# Name: strategy, precision, the rest of the config.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zero1": ("zero1", "bf16", {}),
    "zero3": ("zero3", "bf16", {}),
    "zero3 fp16": ("zero3", "fp16", {}),
    "zero1 on the host": ("zero1", "bf16", {"offload": {"optimizer": "host"}}),
    "zero3 on the host": (
        "zero3",
        "bf16",
        {"offload": {"optimizer": "host", "params": "host", "late_update": True}},
    ),
}


def on_this(name: str, layout: str, seed: int, folder: str) -> dict[str, Any]:
    strategy, precision, more = LAYOUTS[layout]
    on_device.schedule(seed)
    return sharded(name, strategy, precision, folder, more, on_device.device())


# Every layout with two of the optimizers.
PAIRS = [(name, one) for i, one in enumerate(LAYOUTS) for name in list(EXACT)[i % 2 :: 2]]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_all_ranks_see_what_plain_torch_gives(name, layout, device_pools, tmp_path):
    outcomes = device_pools(WORLD).run(on_this, name, layout, 3, str(tmp_path))
    compared(name, LAYOUTS[layout][1], outcomes)


# State and options that a constructor makes on the device of the parameters.
MADE: dict[str, Any] = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "a tensor as rate": lambda params: torch.optim.RMSprop(params, lr=torch.tensor(0.01)),
}


def made_there(name: str, offload: str) -> dict[str, torch.Tensor]:
    import penstock  # noqa: PLC0415

    on_device.schedule(5)
    place = on_device.device()
    model = training.moved(Net(), place)
    rank = training.dist.get_rank()
    config = {"strategy": "zero2", "offload": {"optimizer": offload}, "comm": {"timeout_s": 30}}
    engine = penstock.initialize(model, config, optimizer=MADE[name](model.parameters()))
    for step in range(3):
        engine.backward(engine(inputs(step, "fp32")[rank].to(place)))
        assert engine.step()
    engine.close()
    return of(model)


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("name", MADE)
def test_state_of_the_constructor(name, offload, device_pools):
    model = Net()
    optimizer = MADE[name](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (sum(model(x) for x in inputs(step, "fp32")) / WORLD).backward()
        optimizer.step()
    for ours in device_pools(WORLD).run(made_there, name, offload):
        for key, value in of(model).items():
            assert torch.allclose(ours[key], value, rtol=1e-5, atol=1e-6), key
