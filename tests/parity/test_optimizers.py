"""Every elementwise optimizer updates as its class does in plain torch; others are refused. And the
loss scale of fp16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import compare
import models
import pytest
import torch
import torch.distributed as dist
import training
import zoo
from ranks import Failure
from torch import nn
from training import Tensors

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
WORLD = 2
SAMPLES = WORLD * training.MICRO
STEPS = 8
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)

Make = Callable[..., torch.optim.Optimizer]  # of parameters or groups


class PlainLion(torch.optim.Optimizer):
    """arXiv:2302.06675, program 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def penstock_lion(params: Any, **options: Any) -> torch.optim.Optimizer:
    import penstock  # noqa: PLC0415

    return penstock.Lion(params, **options)


OPTIM = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "AdamW": functools.partial(OPTIM.AdamW, eps=1e-4, betas=(0.8, 0.95)),
    "Adam": functools.partial(OPTIM.Adam, eps=1e-4),
    "Adam decoupled": functools.partial(OPTIM.Adam, eps=1e-4, decoupled_weight_decay=True),
    "SGD": OPTIM.SGD,
    "SGD momentum": functools.partial(OPTIM.SGD, momentum=0.9),
    "SGD Nesterov": functools.partial(OPTIM.SGD, momentum=0.9, nesterov=True),
    "SGD dampening": functools.partial(OPTIM.SGD, momentum=0.8, dampening=0.3),
    "Adagrad": functools.partial(OPTIM.Adagrad, eps=1e-4),
    "Adagrad lr_decay": functools.partial(OPTIM.Adagrad, eps=1e-4, lr_decay=0.1),
    "Adagrad started": functools.partial(OPTIM.Adagrad, eps=1e-4, initial_accumulator_value=0.1),
    "Lion": functools.partial(penstock_lion, betas=(0.8, 0.95)),
    "RMSprop": functools.partial(OPTIM.RMSprop, eps=1e-4, momentum=0.5, centered=True),
    "Adadelta": functools.partial(OPTIM.Adadelta, eps=1e-4),
    "Adamax": functools.partial(OPTIM.Adamax, eps=1e-4),
    "NAdam": functools.partial(OPTIM.NAdam, eps=1e-4),
    "RAdam": functools.partial(OPTIM.RAdam, eps=1e-4),
    "AdamW amsgrad": functools.partial(OPTIM.AdamW, eps=1e-4, amsgrad=True),
    "Adam maximize": functools.partial(OPTIM.Adam, eps=1e-4, maximize=True),
}
# What each is held against, where that is not the class itself.
PLAIN: dict[str, Make] = {"Lion": functools.partial(PlainLion, betas=(0.8, 0.95))}


def rounded(make: Make) -> Make:
    """The same optimizer; its moments are rounded to bf16 after each step."""

    def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for key in {"exp_avg", "exp_avg_sq", "momentum_buffer", "momentum"} & state.keys():
                state[key].copy_(state[key].bfloat16())

    def build(params: Any) -> torch.optim.Optimizer:
        optimizer = make(params)
        optimizer.register_step_post_hook(round_moments)
        return optimizer

    return build


# The section "optimizer" of a config, and the same in torch.
CONFIGS: dict[str, tuple[dict[str, Any], Make]] = {
    "AdamW": ({"lr": 3e-3, "eps": 1e-4}, functools.partial(OPTIM.AdamW, lr=3e-3, eps=1e-4)),
    "Adam": ({"lr": 3e-3, "eps": 1e-4}, functools.partial(OPTIM.Adam, lr=3e-3, eps=1e-4)),
    "SGD": (
        {"lr": 5e-3, "momentum": 0.9, "nesterov": True},
        functools.partial(OPTIM.SGD, lr=5e-3, momentum=0.9, nesterov=True),
    ),
    "Lion": ({}, functools.partial(PlainLion, lr=1e-4)),  # defaults
    "Lion with options": (
        {"type": "Lion", "lr": 1e-3, "betas": [0.7, 0.9], "weight_decay": 0.5},
        functools.partial(PlainLion, lr=1e-3, betas=(0.7, 0.9), weight_decay=0.5),
    ),
    "Adagrad": ({}, OPTIM.Adagrad),
    "Adagrad with options": (
        {"type": "Adagrad", "lr": 3e-2, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-4},
        functools.partial(OPTIM.Adagrad, lr=3e-2, lr_decay=0.2, weight_decay=0.1, eps=1e-4),
    ),
}
WITH_BF16_MOMENTS = ("AdamW", "Adam", "SGD", "Lion with options")
BF16 = {"moments_dtype": "bf16"}
CONFIGS |= {
    f"{name}, bf16 moments": ({"type": name} | CONFIGS[name][0] | BF16, rounded(CONFIGS[name][1]))
    for name in WITH_BF16_MOMENTS
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "lr": 2e-3, "weight_decay": 0.2},
        {"params": others, "lr": 5e-3, "weight_decay": 0.05},
    ]


def batches() -> list[zoo.Part]:
    return models.batches("awkward", STEPS, SAMPLES)


def plain_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    for batch in batches():
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def trained(model: nn.Module, config: dict[str, Any], optimizer: Any) -> Tensors:
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(model, config, optimizer=optimizer)
    for batch in batches():
        training.backwards(engine, batch, 1)
        assert engine.step() is True
    weights = engine.state_dict()
    engine.close()
    return weights


def base_config(strategy: str) -> dict[str, Any]:
    return {"strategy": strategy, "comm": {"timeout_s": 120}}


def with_groups(name: str, strategy: str) -> Tensors:
    model = models.build("awkward")
    return trained(model, base_config(strategy), OPTIMIZERS[name](two_groups(model)))


@every_strategy
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_groups(name, strategy, pools):
    ours, _ = pools(WORLD).run(with_groups, name, strategy)
    model = models.build("awkward")
    make = PLAIN.get(name, OPTIMIZERS[name])
    theirs = plain_weights(model, make(two_groups(model)))
    assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT


def by_callable(name: str, strategy: str) -> Tensors:
    make = functools.partial(OPTIMIZERS[name], lr=2e-3)
    return trained(models.build("awkward"), base_config(strategy), make)


@every_strategy
@pytest.mark.parametrize("name", ["Lion", "Adagrad", "RMSprop", "NAdam"])
def test_callable(name, strategy, pools):
    ours, _ = pools(WORLD).run(by_callable, name, strategy)
    model = models.build("awkward")
    make = PLAIN.get(name, OPTIMIZERS[name])
    theirs = plain_weights(model, make(model.parameters(), lr=2e-3))
    assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT


def by_config(name: str, strategy: str) -> Tensors:
    section = {"type": name} | CONFIGS[name][0]
    config = base_config(strategy) | {"optimizer": section}
    return trained(models.build("awkward"), config, None)


@every_strategy
@pytest.mark.parametrize("name", CONFIGS)
def test_config(name, strategy, pools):
    ours, _ = pools(WORLD).run(by_config, name, strategy)
    model = models.build("awkward")
    theirs = plain_weights(model, CONFIGS[name][1](model.parameters()))
    assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT


@pytest.mark.parametrize("name", WITH_BF16_MOMENTS)
def test_rounding_moments_shows(name):
    """Else the cases above would pass on fp32 moments."""
    weights = []
    for case in (name, f"{name}, bf16 moments"):
        model = models.build("awkward")
        weights.append(plain_weights(model, CONFIGS[case][1](model.parameters())))
    assert compare.weight_deviation(*weights) > 3 * compare.WEIGHT_LIMIT


def groups_with_bf16_moments(strategy: str) -> Tensors:
    model = models.build("awkward")
    config = base_config(strategy) | {"optimizer": BF16}
    return trained(model, config, OPTIMIZERS["AdamW"](two_groups(model)))


@every_strategy
def test_bf16_moments_beside_an_optimizer(strategy, pools):
    ours, _ = pools(WORLD).run(groups_with_bf16_moments, strategy)
    model = models.build("awkward")
    theirs = plain_weights(model, rounded(OPTIMIZERS["AdamW"])(two_groups(model)))
    assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT


# ---- the table of kinds


def test_defaults_are_those_of_torch():
    from penstock._native import _penstock  # noqa: PLC0415

    parameter = nn.Parameter(torch.ones(2))
    for kind in _penstock.OPTIMIZER_KINDS:
        make = {"Lion": PlainLion}.get(kind.name) or getattr(OPTIM, kind.name)
        group = make([parameter]).param_groups[0]
        for key in set(kind.keys) - {"moments_dtype", "layout"}:
            ours, theirs = kind.defaults[key], group[key]
            assert (tuple(ours) if key == "betas" else ours) == theirs, f"{kind.name} {key}"


# ---- hyperparameters that are tensors, or change


def awkward_groups(model: nn.Module, way: str) -> list[dict[str, Any]]:
    groups = two_groups(model)
    if way == "one group decoupled":
        groups[0]["decoupled_weight_decay"] = True
    if way == "tensor lr":
        for group in groups:
            group["lr"] = torch.tensor(group["lr"])
    return groups


def awkwardly(way: str, offload: str) -> Tensors:
    model = models.build("awkward")
    # Disk: only the engine's own kernels work there.
    config = base_config("zero3") | {"offload": {"optimizer": offload}}
    return trained(model, config, OPTIMIZERS["Adam"](awkward_groups(model, way)))


@pytest.mark.parametrize("way", ["one group decoupled", "tensor lr"])
def test_awkward_groups_run_on_the_kernels(way, pools):
    ours, _ = pools(WORLD).run(awkwardly, way, "disk")
    model = models.build("awkward")
    theirs = plain_weights(model, OPTIMIZERS["Adam"](awkward_groups(model, way)))
    assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT


def small_engine(optimizer: Any, **settings: Any) -> Any:
    """On one rank; with it a function that takes a step."""
    import penstock  # noqa: PLC0415

    model = nn.Linear(4, 3)
    engine = penstock.initialize(model, settings, optimizer=optimizer(model.parameters()))

    def step() -> bool:
        engine.backward(engine(torch.ones(2, 4)).sum())
        return engine.step()

    return engine, step


def test_lr_that_becomes_a_tensor():
    engine, step = small_engine(functools.partial(OPTIM.SGD, lr=0.1))
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    before = engine.module.weight.detach().clone()
    assert step()
    assert torch.equal(engine.module.weight, before)
    engine.optimizer.param_groups[0]["lr"].fill_(0.5)
    assert step()
    assert torch.allclose(engine.module.weight, before - 0.5 * 2)
    engine.close()


@pytest.mark.parametrize("offload", ["none", "host"])
def test_momentum_that_comes_later_is_refused(offload):
    import penstock  # noqa: PLC0415

    engine, step = small_engine(
        functools.partial(OPTIM.SGD, lr=0.1), offload={"optimizer": offload}
    )
    before = engine.module.weight.detach().clone()
    engine.lr_scheduler = OPTIM.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=9)
    with pytest.raises(penstock.ConfigError, match=r'"momentum" .*0\.95.*momentum > 0'):
        step()
    assert torch.equal(engine.module.weight, before)
    engine.optimizer.param_groups[0]["momentum"] = 0.0  # the window is still there
    assert engine.step()
    assert not torch.equal(engine.module.weight, before)
    engine.close()


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_that_come_later_are_refused(option):
    import penstock  # noqa: PLC0415

    engine, step = small_engine(OPTIM.AdamW)
    assert step()
    engine.optimizer.param_groups[0][option] = True
    with pytest.raises(penstock.ConfigError, match=f'"{option}"'):
        step()
    engine.close()


def test_a_hyperparameter_that_is_no_number():
    import penstock  # noqa: PLC0415

    engine, step = small_engine(OPTIM.AdamW)
    engine.optimizer.param_groups[0]["betas"] = (0.9, "a")
    with pytest.raises(penstock.ConfigError, match=r"\"betas\".*'a'"):
        step()
    engine.close()


def test_optimizer_null_is_not_set():
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(nn.Linear(2, 2), {"optimizer": None})
    assert isinstance(engine.optimizer, OPTIM.AdamW)
    engine.close()
    model = nn.Linear(2, 2)
    given = OPTIM.SGD(model.parameters(), lr=0.1)
    engine = penstock.initialize(model, {"optimizer": None}, optimizer=given)
    assert engine.optimizer is given
    engine.close()


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ({"optimizer": BF16}, "RMSprop", "optimizer.moments_dtype.*of your own"),
        ({"optimizer": BF16}, "Adagrad", "optimizer.moments_dtype.*Adagrad"),
        ({"optimizer": BF16 | {"lr": 1e-3}}, "AdamW", "Remove one"),
        ({"optimizer": BF16 | {"type": "SGD"}}, None, "momentum is 0"),
        ({"table": {"optim": {"rest": "SS@device:bf16"}}}, None, "optimizer.moments_dtype"),
    ],
)
def test_bf16_moments_refused(config, name, says):
    import penstock  # noqa: PLC0415

    model = models.build("awkward")
    given = None if name is None else OPTIMIZERS[name](two_groups(model))
    with pytest.raises(penstock.ConfigError, match=says):
        penstock.initialize(model, config, optimizer=given)


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by its norm (as arXiv:1904.00962 does)."""

    def __init__(self, params: Iterable[torch.Tensor]):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


WHOLE_TENSOR: dict[str, Make] = {
    name: getattr(torch.optim, name)
    for name in ("LBFGS", "Adafactor", "Muon")
    if hasattr(torch.optim, name)  # Muon: since 2.9
} | {"Lamb": Lamb}


@pytest.mark.parametrize("way", ["object", "callable"])
@pytest.mark.parametrize("name", WHOLE_TENSOR)
def test_not_elementwise(name, way):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
    before = [p.detach().clone() for p in model.parameters()]
    make = WHOLE_TENSOR[name]
    given = make(model.parameters()) if way == "object" else make
    if way == "callable":
        given = lambda params: make(params)  # noqa: E731 - a class is refused for what it is
    with pytest.raises(penstock.ConfigError, match="not elementwise") as caught:
        config = {"strategy": "zero3", "optimizer": {"layout": "flat"}}
        penstock.initialize(model, config, optimizer=given)
    assert name in str(caught.value)
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then), "the probe changed the model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lion_without_an_engine(dtype):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    own, plain = (nn.Parameter(torch.linspace(-1, 1, 7, dtype=dtype)) for _ in range(2))
    idle = nn.Parameter(torch.ones(2, dtype=dtype))  # without a gradient
    options = {"lr": 0.1, "betas": (0.7, 0.9), "weight_decay": 0.5}
    ours, reference = penstock.Lion([own, idle], **options), PlainLion([plain], **options)
    for _ in range(4):
        own.grad = torch.randn(7).to(dtype)
        plain.grad = own.grad.clone()
        assert ours.step(lambda: 3.0) == 3.0
        reference.step()
        limit = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(own, plain, rtol=limit, atol=limit)
    assert torch.equal(idle, torch.ones_like(idle)) and idle not in ours.state


# ---- the loss scale

# fp16 ends at 65504.
HUGE = 1e12


def start_fp16(strategy: str, kind: str, accumulate: int, **loss_scale: float) -> Any:
    import penstock  # noqa: PLC0415

    config = base_config(strategy) | {
        "precision": "fp16",
        "batch": {"accumulate": accumulate},
        "loss_scale": loss_scale,
    }
    model = models.build("awkward")
    return penstock.initialize(model, config, optimizer=OPTIMIZERS[kind](two_groups(model)))


def window(engine: Any, batch: zoo.Part, factors: list[float]) -> bool:
    """A window of len(factors) micro-batches; each loss is multiplied by its factor."""
    for micro, factor in enumerate(factors):
        engine.backward(engine(*training.rank_part(batch, micro)) * factor)
    return engine.step()


def digest(engine: Any) -> str:
    with engine.gathered():
        return training.digest(engine.module)


def without_overflow(strategy: str, kind: str) -> Tensors:
    engine = start_fp16(strategy, kind, 2, initial=256)
    first, _, third = models.batches("awkward", 3, 2 * SAMPLES)
    assert window(engine, first, [1, 1]) and window(engine, third, [1, 1])
    weights = engine.state_dict()
    engine.close()
    return weights


def overflow_once(strategy: str, kind: str) -> dict[str, Any]:
    engine = start_fp16(strategy, kind, 2, initial=256)
    first, second, third = models.batches("awkward", 3, 2 * SAMPLES)
    assert window(engine, first, [1, 1]) is True
    assert (engine.loss_scale, engine.skipped_steps, engine.overflow) == (256, 0, "")
    masters, before = engine.state_dict(), digest(engine)
    # Only rank 1's second micro-step overflows.
    applied = window(engine, second, [1, HUGE if dist.get_rank() == 1 else 1])
    after = engine.state_dict()
    assert all(torch.equal(masters[name], after[name]) for name in masters), "masters changed"
    found = {
        "applied": applied,
        "same weights": digest(engine) == before,
        "scale": engine.loss_scale,
        "skipped": engine.skipped_steps,
        "steps": engine.steps,
        "overflow": engine.overflow,
    }
    found["next"] = window(engine, third, [1, 1])
    found["moved"] = digest(engine) != before
    found["weights"] = engine.state_dict()
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
@every_strategy
def test_overflow_skips_the_step_everywhere(strategy, kind, pools):
    names = [name for name, _ in models.build("awkward").named_parameters()]
    outcomes = pools(WORLD).run(overflow_once, strategy, kind)
    for found in outcomes:
        assert found["applied"] is False and found["same weights"]
        assert (found["scale"], found["skipped"], found["steps"]) == (128, 1, 1)
        assert found["next"] is True and found["moved"]
        text = found["overflow"]
        assert any(f'"{name}"' in text for name in names), text
        assert "rank 1" in text and "step 2" in text and "micro-step 1" in text, text
    assert outcomes[0]["overflow"] == outcomes[1]["overflow"]
    # The skipped batch leaves no trace, in moments either.
    theirs, _ = pools(WORLD).run(without_overflow, strategy, kind)
    assert compare.weight_deviation(outcomes[0]["weights"], theirs) <= compare.WEIGHT_LIMIT


def good_steps(strategy: str) -> list[float]:
    engine = start_fp16(strategy, "AdamW", 1, initial=64, window=3)
    scales = []
    for index, batch in enumerate(models.batches("awkward", 9, SAMPLES)):
        window(engine, batch, [HUGE if index == 4 else 1])
        scales.append(engine.loss_scale)
    engine.close()
    return scales


@every_strategy
def test_scale_doubles_after_a_window_of_good_steps(strategy, pools):
    # The fifth step overflows, and the count of good ones begins anew.
    scales = [64, 64, 128, 128, 64, 64, 64, 128, 128]
    assert pools(WORLD).run(good_steps, strategy) == [scales] * WORLD


def overflow_at_the_least_scale(strategy: str) -> None:
    engine = start_fp16(strategy, "AdamW", 1, initial=8, min=4)
    batch = batches()[0]
    assert window(engine, batch, [HUGE]) is False
    assert (engine.loss_scale, engine.skipped_steps) == (4, 1)
    window(engine, batch, [HUGE])


@every_strategy
def test_overflow_at_the_least_scale_is_an_error(strategy, pools):
    names = [name for name, _ in models.build("awkward").named_parameters()]
    for outcome in pools(WORLD).attempt(overflow_at_the_least_scale, strategy):
        assert isinstance(outcome, Failure), f"went on: {outcome}"
        assert outcome.is_a("RuntimeFault"), outcome.trace
        assert any(f'"{name}"' in outcome.text for name in names), outcome.text
