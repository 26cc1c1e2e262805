"""The engine's parameters, optimizer state and fp16 losses: reads, and what is refused."""

from __future__ import annotations

from typing import Any

import pipe_models as pipes
import pytest
import torch
from raised import raised as error_of
from test_engine_calls import WORLD, engine_of, loss_of, net

# ---- parameters


def read_only() -> dict[str, Any]:
    """Forwards of an engine without an optimizer, for a model of which a part is frozen."""
    model = net()
    model[0].weight.requires_grad_(False)
    flags = [one.requires_grad for one in model.parameters()]
    engine = pipes.deepspeed().initialize(model=model, config={"train_batch_size": WORLD})[0]
    told = {"made": flags == [one.requires_grad for one in model.parameters()]}
    x = torch.ones(2, 4, requires_grad=True)
    engine(x).sum().backward()
    told["inputs"] = bool(x.grad.abs().sum() > 0)
    told["gradients"] = [one.grad is None for one in model.parameters()]
    model[2].bias.requires_grad_(False)  # what the script freezes later stays frozen
    engine(x)
    told["after"] = [one.requires_grad for one in model.parameters()]
    engine.destroy()
    return told


def test_an_engine_without_an_optimizer_keeps_what_is_frozen(drop_in_pools):
    for told in drop_in_pools(WORLD).run(read_only):
        assert told["made"] and told["inputs"] and told["gradients"] == [True] * 4
        assert told["after"] == [False, True, True, False]


class Mpu:
    """An mpu with tensor ranks."""

    def __init__(self, size: int) -> None:
        self.get_model_parallel_world_size = lambda: size


def clipped() -> list[str]:
    pipes.deepspeed()
    from deepspeed.runtime.utils import clip_grad_norm_  # noqa: PLC0415

    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    told = [error_of(clip_grad_norm_, [param], 1.0, 2, Mpu(2))]
    told.append(str(param.grad.tolist()))
    norm = clip_grad_norm_([param], 1.0, 2, Mpu(1))
    told += [str(float(norm)), str(round(float(param.grad.norm()), 3))]
    engine = engine_of(1)
    return [*told, error_of(clip_grad_norm_, engine.module.parameters(), 1.0)]


def test_clipping_by_hand(drop_in_pools):
    for said, untouched, norm, after, of_engine in drop_in_pools(WORLD).run(clipped):
        assert "an mpu with tensor ranks is not supported" in said and untouched == str([1.0] * 4)
        assert (norm, after) == ("2.0", "1.0")
        assert "set gradient_clipping in the config" in of_engine


CONTIGUOUS = [
    ({"contiguous_checkpointing": True}, True),
    ({"contiguous_checkpointing": True, "partition_activations": True}, True),
    ({"contiguous_checkpointing": True, "num_checkpoints": 2}, True),
    (
        {"contiguous_checkpointing": True, "num_checkpoints": 2, "partition_activations": True},
        False,
    ),
    ({"contiguous_checkpointing": False}, False),
]


def configured() -> list[str]:
    configure = pipes.deepspeed().checkpointing.configure
    return [error_of(lambda given=given: configure(None, **given)) for given, _ in CONTIGUOUS]


def test_contiguous_checkpointing_needs_two_settings(drop_in_pools):
    (told,) = drop_in_pools(1).run(configured)
    for said, (_, refused_) in zip(told, CONTIGUOUS, strict=True):
        assert ("needs partitioned activations and the number of layers" in said) == refused_


NO_OPTIMIZER = [
    ("Muon", {"lr": 0.1}, '"optimizer.type" is "Muon"; allowed: "Adam"'),
    ("muon", {"lr": 0.1}, '"optimizer.type" is "muon"; allowed: "Adam"'),
    (
        "Rprop",
        {"lr": 0.1, "decay": 1},
        '"optimizer.params.decay" is not an option of torch.optim.Rprop',
    ),
    ("Adagrad", {"decay": 1}, 'unknown key "optimizer.params.decay"'),
]


def unknown_optimizers() -> list[str]:
    return [
        error_of(lambda given=given: engine_of(1, {"optimizer": given}))
        for given in ({"type": name, "params": params} for name, params, _ in NO_OPTIMIZER)
    ]


def test_optimizers_that_are_not_supported(drop_in_pools):
    (told,) = drop_in_pools(1).run(unknown_optimizers)
    for said, (_, _, text) in zip(told, NO_OPTIMIZER, strict=True):
        assert said.startswith("ConfigError") and text in said


# ---- the optimizer's state


def stated(stage: int, precision: dict[str, Any]) -> dict[str, Any]:
    """Reads and edits of optimizer.state, between steps."""
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = engine_of(stage, adam | precision)

    def step(index: int) -> str:
        def once() -> None:
            engine.backward(loss_of(engine, index, next(engine.module.parameters()).dtype))
            engine.step()

        return error_of(once)

    step(0)
    optimizer, params = engine.basic_optimizer, list(engine.module.parameters())
    state = optimizer.state
    whole = torch.cat([engine.native.param_state(one, "exp_avg").flatten() for one in params])
    own = torch.cat([one["exp_avg"].flatten() for one in state.values()])
    told = {
        "names": [sorted(one) for one in state.values()],
        "same": own.numel() == 0 or bool(torch.isin(own, whole).all()),
        "all": [own.numel(), whole.numel()],
        "shaped": all(state[one]["exp_avg"].shape == one.shape for one in params),
        "has": [params[0] in state, torch.ones(1) in state, len(state), bool(state)],
        "outer": getattr(engine.optimizer, "state", None) is state,
        "read": step(1),
        "set": error_of(state.clear),
    }
    state[params[0]]["exp_avg"].zero_()
    told["edited"], told["then"] = step(2), step(3)
    engine.destroy()
    return told


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, {}), (0, {"bf16": {"enabled": True}}), (2, {}), (3, {})]
)
def test_the_state_can_be_read_and_an_edit_is_an_error(stage, precision, drop_in_pools):
    found = drop_in_pools(WORLD).run(stated, stage, precision)
    for told in found:
        assert told["names"] == [["exp_avg", "exp_avg_sq"]] * 4 and told["same"], told
        assert told["has"] == [True, False, 4, True] and told["outer"], told
        assert (told["read"], told["then"]) == ("", "") and told["shaped"] == (stage == 0), told
        assert "the optimizer's state" in told["set"], told
        assert 'the edit of "exp_avg" has no effect: use' in told["edited"], told
    sizes = [told["all"][0] for told in found]
    assert sizes == [40, 40] if stage == 0 else sum(sizes) == 40


# ---- losses in fp16


def scales(precision: dict[str, Any]) -> list[Any]:
    """needs_scaler(), and what scale() refuses."""
    engine = engine_of(1, precision)
    x = torch.ones(2, 4, dtype=next(engine.module.parameters()).dtype)
    made = engine(x)
    said = [error_of(engine.scale, one) for one in (made, made.detach().sum())]
    engine.destroy()
    return [engine.optimizer.needs_scaler(), *said]


@pytest.mark.parametrize(
    ("precision", "needs"),
    [
        ({"fp16": {"enabled": True}}, True),
        ({"fp16": {"enabled": True, "loss_scale": 1}}, False),
        ({"bf16": {"enabled": True}}, False),
        ({}, False),
    ],
)
def test_scale_takes_a_loss(precision, needs, drop_in_pools):
    for found, *said in drop_in_pools(WORLD).run(scales, precision):
        assert found == needs
        assert "(2, 4); it must be a scalar" in said[0] and "must be a scalar tensor" in said[1]


def shared(call: str, stage: int) -> str:
    """A loss that depends on two engines with a loss scale each."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    one, other = engine_of(stage, fp16), engine_of(stage, fp16)
    x = torch.ones(2, 4, dtype=torch.float16)
    loss = (one(x) + other(x)).float().square().mean()
    calls = {
        "plain": loss.backward,
        "backward": lambda: one.backward(loss),
        "scale": lambda: one.scale(loss).backward(),
    }

    def trained() -> None:
        calls[call]()
        one.step()
        other.step()

    said = error_of(trained)
    one.destroy()
    other.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("call", ["plain", "backward", "scale"])
def test_a_shared_loss_in_fp16_is_refused(call, stage, drop_in_pools):
    """As in DeepSpeed: one loss cannot be multiplied by two scales."""
    for said in drop_in_pools(WORLD).run(shared, call, stage):
        assert "Loss scaling is required" in said


def load_that_fails_on(rank: int, stage: int) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}  # fmt: skip
    model = torch.nn.Linear(4, 4)
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    engine = pipes.deepspeed().initialize(model=model, config=config)[0]

    def load(src, dst):
        if torch.distributed.get_rank() == rank:
            raise KeyError("head")
        dst.load_state_dict(src)

    text = error_of(lambda: engine.load_module_state_dict({"module": weights}, custom_load_fn=load))
    engine.destroy()
    return str(text)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_custom_load_fn_that_fails_on_one_rank_is_an_error_on_all(rank, stage, drop_in_pools):
    for text in drop_in_pools(2).run(load_that_fails_on, rank, stage):
        assert f"rank {rank}: custom_load_fn raised KeyError: 'head'" in text
