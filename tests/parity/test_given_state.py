"""State and gradients that the user sets or reads: the next step is that of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# Optimizer, its arguments, and the state that is set before its first step.
STATES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "momentum": ("SGD", {"momentum": 0.9}, {"momentum_buffer": 2.0}),
    "zero-momentum": ("SGD", {"momentum": 0.9, "dampening": 0.5}, {"momentum_buffer": 0.0}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5}, {"momentum_buffer": 2.0}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, {"momentum_buffer": 2.0}),
    "adamw-moments": ("AdamW", {}, {"exp_avg": 2.0, "exp_avg_sq": 2.0, "step": 0}),
    "adamw-warm": ("AdamW", {}, {"exp_avg": 2.0, "exp_avg_sq": 2.0, "step": 100}),
    "adam-step": ("Adam", {}, {"exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 3}),
    "adagrad": ("Adagrad", {"lr_decay": 0.1}, {"sum": 2.0, "step": 5}),
}
SETTINGS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "host": {"strategy": "zero3", "offload": {"optimizer": "host"}},
}


class Net(nn.Module):
    """Its last layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.never = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module, kind: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind)(model.parameters(), lr=0.1, weight_decay=0.1, **options)


def engine_of(settings: dict[str, Any], kind: str, options: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    model = Net()
    return penstock.initialize(model, settings, optimizer=optimizer_of(model, kind, options))


def mine(step: int) -> torch.Tensor:
    return batch(step).chunk(2)[dist.get_rank()]


def filled(param: torch.Tensor, name: str, value: float) -> torch.Tensor:
    return torch.tensor(float(value)) if name == "step" else torch.full(param.shape, value)


def steps_from(settings, kind, options, state, local):
    engine = engine_of(settings, kind, options)
    for param in engine.module.parameters():
        for name, value in state.items():
            whole = filled(param, name, value)
            if local and name != "step":
                begin, own = engine.local_state(param, name)
                part = whole.flatten()[begin : begin + own.numel()]
                engine.set_local_state(param, name, part)
            else:
                engine.set_param_state(param, name, whole)
            assert torch.equal(engine.param_state(param, name), whole)
    for step in range(3):
        engine.backward(engine(mine(step)).square().mean())
        engine.step()
    if "step" in state:
        counts = [
            float(engine.param_state(param, "step")) - state["step"]
            for param in (engine.module.enter.weight, engine.module.never.weight)
        ]
        assert counts == [3.0, 0.0]
    found = engine.state_dict()
    engine.close()
    return found


@pytest.mark.parametrize("local", [False, True], ids=["whole", "local"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", STATES.values(), ids=STATES)
def test_the_first_step_goes_on_from_state_that_was_set(case, settings, local, pools):
    kind, options, state = case
    model = Net()
    optimizer = optimizer_of(model, kind, options)
    for param in model.parameters():
        optimizer.state[param] = {name: filled(param, name, value) for name, value in state.items()}
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    found = pools(2).run(steps_from, settings, kind, options, state, local)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("SGD", 3.0, 'keeps no "step"'),
        ("AdamW", -1.0, "one whole number"),
        ("AdamW", 0.5, "one whole number"),
        ("AdamW", float("nan"), "one whole number"),
        ("AdamW", float("inf"), "one whole number"),
        ("AdamW", 2.0**24 + 2, "one whole number"),
    ],
)
def test_a_step_count_that_is_refused(kind, value, says, pools):
    pools(2).run(refused_count, kind, value, says)


def refused_count(kind, value, says):
    import penstock  # noqa: PLC0415

    engine = engine_of({"strategy": "zero3"}, kind, {"momentum": 0.9} if kind == "SGD" else {})
    with pytest.raises(penstock.ConfigError, match=says):
        engine.set_param_state(engine.module.enter.weight, "step", torch.tensor(value))
    if kind == "AdamW":
        with pytest.raises(penstock.ConfigError, match="one number for the full parameter"):
            engine.local_state(engine.module.enter.weight, "step")
    engine.close()


def frozen_count():
    import penstock  # noqa: PLC0415

    model = Net()
    model.never.requires_grad_(False)
    engine = penstock.initialize(
        model, {"strategy": "zero3"}, optimizer={"type": "AdamW", "lr": 0.1}
    )
    for call in (
        lambda: engine.param_state(model.never.weight, "step"),
        lambda: engine.set_param_state(model.never.weight, "step", torch.tensor(1.0)),
    ):
        with pytest.raises(penstock.ConfigError, match="is frozen"):
            call()
    engine.close()


def test_a_frozen_parameter_has_no_step_count(pools):
    pools(2).run(frozen_count)


def clipped_by_value(settings, kind):
    engine = engine_of(settings, kind, {})
    names = []
    for step in range(3):
        engine.backward(engine(mine(step)).square().mean())
        gradients = engine.full_grads()
        names.append(sorted(gradients))
        assert engine.param_grad(engine.module.never.weight) is None
        assert engine.module.never.weight.grad is None
        engine.set_grads({name: value.clamp(-0.1, 0.1) for name, value in gradients.items()})
        engine.step()
    found = engine.state_dict()
    engine.close()
    return names, found


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_that_are_read_and_set_leave_unreached_weights_alone(settings, kind, pools):
    model = Net()
    optimizer = optimizer_of(model, kind, {})
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.clamp_(-0.1, 0.1)
        optimizer.step()
    names, found = pools(2).run(clipped_by_value, settings, kind)[0]
    assert names == [["enter.bias", "enter.weight", "leave.bias", "leave.weight"]] * 3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def scheduled_by_hand():
    import warnings  # noqa: PLC0415

    engine = engine_of({"strategy": "zero1"}, "AdamW", {})
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(engine(mine(0)).square().mean())
        engine.step()
        schedule.step()
    engine.close()


def test_a_schedule_that_the_user_steps_sees_the_optimizer_step(pools):
    pools(2).run(scheduled_by_hand)
