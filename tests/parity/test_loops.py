"""The loops people write: each is one function that runs twice, with an engine on two ranks and on
plain torch in one process, and must leave the same weights.

A loop is given what trains (an engine, or Plain) and its data: by step, the micro-batches. It
returns numbers that must agree, too, once averaged over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import compare
import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
import zoo
from ranks import Failure
from torch import nn
from training import Tensors
from zoo import Part

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
WORLD = 2
STEPS = 6
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Net(zoo.Regressor):
    """Features in, one number a sample out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(zoo.Mlp() for _ in range(3)))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.lift(features))
        return self.leave(x).squeeze(-1)


class Plain:
    """What of the engine's interface the loops use, on plain torch."""

    def __init__(self, accumulate: int):
        self.module = models.fill(Net())
        self.optimizer = torch.optim.AdamW(self.module.parameters(), **training.ADAMW)
        self.accumulate, self.seen = accumulate, 0
        self.train, self.eval, self.no_sync = self.module.train, self.module.eval, no_sync

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.module(features)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        self.seen += 1

    @property
    def divisor(self) -> int:
        return max(1, min(self.seen, self.accumulate))

    def full_grads(self) -> Tensors:
        trained = self.module.named_parameters()
        return {name: p.grad / self.divisor for name, p in trained if p.grad is not None}

    def set_grads(self, gradients: Tensors) -> None:
        for name, gradient in gradients.items():
            self.module.get_parameter(name).grad = gradient * self.divisor

    def step(self, force: bool = False) -> bool:
        if not force and self.seen < self.accumulate and self.accumulate > 1:
            return False
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.divisor
        self.seen = 0
        self.grad_norm = compare.norm(self.full_grads())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True


@contextlib.contextmanager
def no_sync():
    yield


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def loss_of(engine: Any, part: Part) -> torch.Tensor:
    return F.mse_loss(engine(part[0]).float(), part[1])


# ---- the loops

GRADIENTS_ON_DISK = {"optimizer": "host", "gradients": "disk"}

Data = list[list[Part]]


def plain_loop(engine: Any, data: Data) -> list[float]:
    losses = []
    for (part,) in data:
        loss = loss_of(engine, part)
        losses.append(loss.item())
        engine.backward(loss)
        assert engine.step() is True
    return losses


def several_backwards(engine: Any, data: Data) -> None:
    for parts in data:
        for part in parts:
            engine.backward(loss_of(engine, part))
        assert engine.step() is True


def contrastive(engine: Any, data: Data) -> None:
    for first, second, third in data:
        anchor, near, far = engine(first[0]), engine(second[0]), engine(third[0])
        engine.backward(F.softplus((anchor - near).pow(2) - (anchor - far).pow(2)).mean())
        engine.step()


def two_losses(engine: Any, data: Data) -> None:
    for first, second in data:
        one, other = loss_of(engine, first), engine(second[0]).abs().mean()
        engine.backward(one)
        engine.backward(other)
        engine.step()


def losses_of_one_forward(engine: Any, data: Data) -> None:
    for ((features, targets),) in data:
        output = engine(features)
        engine.backward(F.mse_loss(output, targets), retain_graph=True)
        engine.backward(output.abs().mean())
        engine.step()


def retained_graph(engine: Any, data: Data) -> None:
    for (part,) in data:
        loss = loss_of(engine, part)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()


def gradient_penalty(engine: Any, data: Data) -> None:
    for ((features, targets),) in data:
        features = features.clone().requires_grad_()
        output = engine(features)
        (slope,) = torch.autograd.grad(output.sum(), features, create_graph=True)
        engine.backward(F.mse_loss(output, targets) + slope.pow(2).sum(-1).mean())
        engine.step()


def accumulate_in_no_sync(engine: Any, data: Data) -> None:
    for *parts, last in data:
        with engine.no_sync():
            for part in parts:
                engine.backward(loss_of(engine, part))
                engine.step()
        engine.backward(loss_of(engine, last))
        assert engine.step() is True


def backwards_in_no_sync(engine: Any, data: Data) -> None:
    for *parts, last in data:
        with engine.no_sync():
            for part in parts:
                engine.backward(loss_of(engine, part))
        engine.backward(loss_of(engine, last))
        assert engine.step() is True


def incomplete_window(engine: Any, data: Data) -> None:
    for step, parts in enumerate(data):
        if step in (2, 3):  # the end of an epoch
            parts = parts[: 4 - step]
        for part in parts:
            engine.backward(loss_of(engine, part))
            applied = engine.step()
        assert applied is (len(parts) == 3)
        assert applied or engine.step(force=True) is True


def token_weighted(engine: Any, data: Data) -> None:
    """Ranks have different numbers of tokens; the loss is the mean over all of them."""
    for ((features, targets),) in data:
        tokens = 1.0 + (features > 0).sum(-1)
        losses = (engine(features) - targets).pow(2) * tokens
        engine.backward(losses.sum() * world_size() / total(tokens.sum()))
        engine.step()


def divided_by_user(engine: Any, data: Data) -> None:
    for parts in data:
        for part in parts:
            engine.backward(loss_of(engine, part) / len(parts))
        engine.step()


def divided_by_engine(engine: Any, data: Data) -> None:
    for parts in data:
        for part in parts:
            engine.backward(loss_of(engine, part))
            applied = engine.step()
        assert applied is True


def edited_gradients(engine: Any, data: Data) -> list[float]:
    norms = []
    for parts in data:
        for part in parts:
            engine.backward(loss_of(engine, part))
        gradients = engine.full_grads()
        norms.append(compare.norm(gradients))
        edited = {name: g.clamp(-0.1, 0.1) for name, g in gradients.items() if "weight" in name}
        engine.set_grads(edited)
        norms.append(compare.norm(engine.full_grads()))
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def edited_biases(engine: Any, data: Data) -> list[float]:
    """Edits that may lie outside of a rank's shard."""
    norms = []
    for (part,) in data:
        engine.backward(loss_of(engine, part))
        gradients = engine.full_grads()
        engine.set_grads({name: g + 1.0 for name, g in gradients.items() if "bias" in name})
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def freeze_and_unfreeze(engine: Any, data: Data) -> None:
    for step, (part,) in enumerate(data):
        engine.module.blocks[0].requires_grad_(not 1 <= step <= 2)
        engine.module.leave.bias.requires_grad_(step != 3)
        engine.backward(loss_of(engine, part))
        engine.step()


def unfrozen_from_the_top(engine: Any, data: Data) -> None:
    """All that trained at first is frozen before the first step, and comes back by and by."""
    for step, (part,) in enumerate(data):
        for index, block in enumerate(engine.module.blocks):
            block.requires_grad_(step >= 3 - index)
        engine.backward(loss_of(engine, part))
        engine.step()


def change_lr(engine: Any, data: Data) -> None:
    for step, (part,) in enumerate(data):
        engine.backward(loss_of(engine, part))
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
            group["weight_decay"] = 0.1 * step
        engine.step()


def split_a_group(engine: Any, data: Data) -> None:
    for step, (part,) in enumerate(data):
        if step == 2:
            group = engine.optimizer.param_groups[0]
            half = len(group["params"]) // 2
            kept, moved = group["params"][:half], group["params"][half:]
            group["params"] = kept
            engine.optimizer.add_param_group({"params": moved, "lr": 2e-2, "weight_decay": 0.0})
        engine.backward(loss_of(engine, part))
        engine.step()


def exchange_groups(engine: Any, data: Data) -> None:
    """As before, and later the groups, which are as large as each other, exchange parameters."""
    split_a_group(engine, data[:4])
    one, other = engine.optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]
    for (part,) in data[4:]:
        engine.backward(loss_of(engine, part))
        engine.step()


def evaluation(engine: Any, data: Data) -> list[float]:
    losses = []
    for (part,) in data:
        engine.eval()
        with torch.no_grad():
            losses += [loss_of(engine, part).item() for _ in range(2)]
        engine.train()
        engine.backward(loss_of(engine, part))
        with torch.inference_mode():  # gradients wait meanwhile
            losses.append(loss_of(engine, part).item())
        engine.step()
    return losses


def autocast(engine: Any, data: Data) -> None:
    for (part,) in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(engine, part)
        engine.backward(loss)
        engine.step()


def direct_backward(engine: Any, data: Data) -> None:
    for (part,) in data:
        loss_of(engine, part).backward()
        assert engine.step() is True


class Loop(NamedTuple):
    run: Callable[[Any, Data], list[float] | None]
    micros: int = 1  # micro-batches a step
    accumulate: int = 1  # of the config
    exact: bool = True  # no low precision in it
    # Of the config, where strategies hold gradients sharded.
    offload: Mapping[str, str] = {}


LOOPS = {
    "several backwards": Loop(several_backwards, 3),
    "contrastive": Loop(contrastive, 3),
    "two losses": Loop(two_losses, 2),
    "two losses of one forward": Loop(losses_of_one_forward),
    "two losses of one forward, averaged": Loop(losses_of_one_forward, accumulate=2),
    "retain_graph": Loop(retained_graph),
    "retain_graph, averaged": Loop(retained_graph, accumulate=3),
    "gradient penalty": Loop(gradient_penalty),
    "no_sync": Loop(backwards_in_no_sync, 3),
    "no_sync, averaged": Loop(accumulate_in_no_sync, 3, accumulate=3),
    "incomplete window": Loop(incomplete_window, 3, accumulate=3),
    "token-weighted": Loop(token_weighted),
    "divided by the user": Loop(divided_by_user, 3),
    "divided by the engine": Loop(divided_by_engine, 3, accumulate=3),
    "edited gradients": Loop(edited_gradients, 2),
    "edited gradients, averaged": Loop(edited_gradients, 2, accumulate=2),
    "edited gradients, on disk": Loop(edited_gradients, 2, offload=GRADIENTS_ON_DISK),
    "edited biases, on disk": Loop(edited_biases, offload=GRADIENTS_ON_DISK),
    "freeze": Loop(freeze_and_unfreeze),
    "unfreeze": Loop(unfrozen_from_the_top),
    "lr by hand": Loop(change_lr),
    "group split": Loop(split_a_group),
    "groups exchanged": Loop(exchange_groups),
    "evaluation": Loop(evaluation),
    "autocast": Loop(autocast, exact=False),
    "direct backward": Loop(direct_backward),
}


def data_of(micros: int, ranks: int, rank: int) -> Data:
    """All data dealt to `ranks`: what this rank trains on."""
    size = WORLD // ranks * training.MICRO
    batches = models.batches("awkward", STEPS, micros * WORLD * training.MICRO)
    parts = [list(zip(*(t.split(size) for t in batch), strict=True)) for batch in batches]
    return [step[rank::ranks] for step in parts]


def start(strategy: str, accumulate: int = 1, **others: Any) -> Any:
    import penstock  # noqa: PLC0415

    config = {
        "strategy": strategy,
        "optimizer": {"type": "AdamW"} | training.ADAMW,
        "batch": {"accumulate": accumulate},
        "comm": {"timeout_s": 120, "bucket_bytes": 0},
    }
    return penstock.initialize(models.fill(Net()), config | others)


def run_plain(loop: Loop) -> tuple[Tensors, list[float]]:
    plain = Plain(loop.accumulate)
    numbers = loop.run(plain, data_of(loop.micros, 1, 0)) or []
    return {name: tensor.detach() for name, tensor in plain.module.state_dict().items()}, numbers


def on_ranks(name: str, strategy: str) -> tuple[Tensors, list[float]]:
    loop = LOOPS[name]
    offload = loop.offload if strategy in ("zero2", "zero3") else {}
    engine = start(strategy, loop.accumulate, offload=dict(offload))
    numbers = loop.run(engine, data_of(loop.micros, WORLD, dist.get_rank())) or []
    weights = engine.state_dict()
    engine.close()
    return weights, numbers


@every_strategy
@pytest.mark.parametrize("name", LOOPS)
def test_loop(name, strategy, pools):
    loop = LOOPS[name]
    theirs, their_numbers = run_plain(loop)
    (ours, first), (_, second) = pools(WORLD).run(on_ranks, name, strategy)
    numbers = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert numbers == pytest.approx(their_numbers, rel=1e-5)
    if loop.exact:
        assert compare.weight_deviation(ours, theirs) <= compare.WEIGHT_LIMIT
        return
    start_weights = models.fill(Net()).state_dict()
    exact, _ = run_plain(Loop(plain_loop))
    own = compare.change_deviation(theirs, exact, start_weights)
    limit = compare.BF16_RATIO * own + compare.BF16_SLACK["weights"]
    assert compare.change_deviation(ours, exact, start_weights) <= limit


# ---- what is refused


def create_graph(strategy: str) -> None:
    engine = start(strategy)
    engine.backward(loss_of(engine, data_of(1, WORLD, dist.get_rank())[0][0]), create_graph=True)


def direct_backward_in_fp16(strategy: str) -> None:
    engine = start(strategy, precision="fp16")
    loss_of(engine, data_of(1, WORLD, dist.get_rank())[0][0]).backward()


def unfreeze_what_never_trained(strategy: str) -> None:
    import penstock  # noqa: PLC0415

    model = models.fill(Net())
    model.blocks[1].requires_grad_(False)
    engine = penstock.initialize(model, {"strategy": strategy, "comm": {"timeout_s": 120}})
    for step, (part,) in enumerate(data_of(1, WORLD, dist.get_rank())):
        model.blocks[1].requires_grad_(step >= 2)
        engine.backward(loss_of(engine, part))
        engine.step()


REFUSED = {
    "create_graph": (create_graph, "ConfigError", ["create_graph", "autograd.grad"]),
    "direct backward in fp16": (
        direct_backward_in_fp16,
        "RuntimeError",  # torch's: autograd passes on the text of what a hook throws
        ["fp16", "engine.backward(loss)"],
    ),
    "unfreeze what never trained": (
        unfreeze_what_never_trained,
        "RuntimeFault",
        ["blocks.1.up.weight", "frozen at initialize()"],
    ),
}


@every_strategy
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, strategy, pools, record_property):
    loop, kind, words = REFUSED[name]
    for outcome in pools(WORLD).attempt(loop, strategy):
        assert isinstance(outcome, Failure), f"went on: {outcome}"
        assert outcome.is_a(kind) or outcome.kind == f"builtins.{kind}", outcome.trace
        for word in words:
            assert word in outcome.text, f"{word!r} is not in {outcome.text!r}"
    record_property("refused", f"{kind}: {outcome.text}")
