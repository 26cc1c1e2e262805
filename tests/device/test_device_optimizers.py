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
    config = {"strategy": "zero2", "offload": {"optimizer": offload}, "comm": {"timeout_s": 120}}
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


def edited(
    strategy: str, offload: str, rest: str, place: str
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after steps between which every rank clamps its weights, once and never again."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    model = training.moved(torch.nn.Sequential(*layers), place)
    samples = torch.randn(4, training.dist.get_world_size(), 3, 8).bfloat16().to(place)
    config = {
        "strategy": strategy,
        "precision": "bf16",
        "optimizer": {"type": "SGD", "lr": 0.01},
        "offload": {"optimizer": offload},
        "table": {"optim": {"rest": rest}} if rest else {},
        "comm": {"timeout_s": 120},
    }
    engine = penstock.initialize(model, config)
    largest = []
    for step in range(4):
        engine.backward(engine(samples[step, training.dist.get_rank()]).float().square().mean())
        engine.step()
        if step == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-1 / 64, 1 / 64)
        largest.append(max(one.abs().max().item() for one in model.parameters()))
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return weights, largest


def edited_on_both(*setting: str) -> Any:
    on_device.schedule(2)
    return edited(*setting, on_device.device()), edited(*setting, "cpu")


EDITED = [
    (strategy, tier, "") for strategy in ("ddp", "zero1", "zero2") for tier in ("none", "host")
]
# Masters that rest otherwise than they are updated.
EDITED += [("ddp", "none", "SS@device:fp32"), ("zero1", "none", "RR@device:fp32")]


@pytest.mark.parametrize(("strategy", "offload", "rest"), EDITED)
def test_edits_of_low_precision_weights_reach_their_masters(strategy, offload, rest, device_pools):
    outcomes = device_pools(WORLD).run(edited_on_both, strategy, offload, rest)
    for (there, most), (here, _) in outcomes:
        assert most[1] <= 1 / 64 < most[0], "the weights were clamped"
        assert most[3] < most[0] / 2, "no update brought the old weights back"
        for name, value in here.items():
            torch.testing.assert_close(there[name].float(), value.float(), rtol=1e-2, atol=1e-4)


class Large(torch.nn.Module):
    """More weights than one call of the optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(4096, 4100)
        self.last = torch.nn.Linear(4100, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(torch.tanh(self.large(x))).square().mean()
        return loss


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As transformers makes them: biases do not decay."""
    named = list(model.named_parameters())
    return [
        {"params": [one for name, one in named if "weight" in name], "weight_decay": 0.5},
        {"params": [one for name, one in named if "bias" in name], "weight_decay": 0.0},
    ]


# Larger than the rounding of gradients, which differs between processors.
EPS = 1e-4


def large(place: str) -> dict[str, torch.Tensor]:
    import penstock  # noqa: PLC0415

    on_device.schedule(4)
    place = on_device.device() if place else "cpu"
    torch.manual_seed(2)
    model, x = Large(), torch.randn(2, 4096)
    if place == "cpu":
        plain = torch.optim.AdamW(two_groups(model), lr=0.01, eps=EPS)
        for _ in range(3):
            model(x).backward()
            plain.step()
            plain.zero_grad()
        return of(model)
    model = training.moved(model, place)
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.01, eps=EPS)
    engine = penstock.initialize(model, {"strategy": "ddp"}, optimizer=optimizer)
    for _ in range(3):
        engine.backward(engine(x.to(place)))
        engine.step()
    engine.close()
    return of(model)


def test_groups_of_a_large_layer(device_pools):
    """Runs of two groups alternate, and a call ends inside one."""
    pool = device_pools(1)
    ours, plain = pool.run(large, "device")[0], pool.run(large, "")[0]
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def published(place: str) -> dict[str, torch.Tensor]:
    """bf16 weights of two groups, whose runs alternate, after some steps."""
    import penstock  # noqa: PLC0415

    on_device.schedule(4)
    place = on_device.device() if place else "cpu"
    torch.manual_seed(6)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)]
    model, x = torch.nn.Sequential(*layers), torch.randn(5, 8).bfloat16()
    model = training.moved(model, place)
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.05)
    config = {"strategy": "ddp", "precision": "bf16"}
    engine = penstock.initialize(model, config, optimizer=optimizer)
    for _ in range(3):
        engine.backward(engine(x.to(place)).float().square().mean())
        engine.step()
    weights = of(model)
    engine.close()
    return weights


def test_weights_of_two_groups_are_published(device_pools):
    pool = device_pools(1)
    ours, here = pool.run(published, "device")[0], pool.run(published, "")[0]
    for name, value in here.items():
        torch.testing.assert_close(ours[name].float(), value.float(), rtol=2e-2, atol=2e-3)
