"""The normative Python API (docs/design.md, section 6), against plain torch.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import functools
import json
import math

import compare
import models
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from training import Case

STEPS = 5
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def initialize(model, config=None, **others):
    import penstock  # noqa: PLC0415

    return penstock.initialize(model, config, **others)


def batches(steps=STEPS, samples=2 * training.MICRO, model="gpt"):
    return models.batches(model, steps, samples)


def start(strategy="zero3", accumulate=1, model="gpt", **others):
    """A small engine, ready to train."""
    config = Case(strategy, accumulate=accumulate, model=model).config() | others
    return initialize(models.build(model), config)


def halves(batch):
    """The parts of a batch of two ranks' micro-batches, one after the other."""
    size = 2 * training.MICRO
    return [tuple(t[i : i + size] for t in batch) for i in range(0, len(batch[0]), size)]


def plain_steps(model, optimizer, steps, scheduler=None):
    """Plain training: each step is a list of batches whose losses add up."""
    for parts in steps:
        optimizer.zero_grad()
        for part in parts:
            model(*part).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def plain_adamw(steps):
    model = models.build("gpt")
    return plain_steps(model, torch.optim.AdamW(model.parameters(), **training.ADAMW), steps)


def assert_same(ours, theirs, limit=compare.WEIGHT_LIMIT):
    assert compare.weight_deviation(ours, theirs) <= limit


# ---- windows


def accumulate_window(strategy):
    engine = start(strategy, accumulate=3)
    answers = []
    for _ in range(2):
        for batch in batches(3):
            engine.backward(engine(*training.rank_part(batch, 0)))
            answers.append(engine.step())
    engine.close()
    return answers


@every_strategy
def test_step_is_false_until_the_window_is_full(strategy, pools):
    for answers in pools(2).run(accumulate_window, strategy):
        assert answers == [False, False, True] * 2


def forced_step(strategy):
    engine = start(strategy, accumulate=3)
    for batch in batches(2):
        engine.backward(engine(*training.rank_part(batch, 0)))
        assert engine.step() is False
    gradients = engine.full_grads()
    assert engine.step(force=True) is True
    weights, norm = engine.state_dict(), engine.grad_norm
    engine.close()
    return weights, gradients, norm


@every_strategy
def test_forced_step_averages_what_was_seen(strategy, pools):
    (weights, gradients, norm), (nothing, others, _) = pools(2).run(forced_step, strategy)
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    for batch in batches(2):
        (model(*batch) / 2).backward()
    theirs = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert compare.gradient_deviation(gradients, theirs) <= compare.GRADIENT_LIMIT
    assert compare.gradient_deviation(others, gradients) == 0
    assert norm == pytest.approx(compare.norm(theirs), rel=1e-5)
    optimizer.step()
    assert_same(weights, model.state_dict())
    assert nothing == {}


def step_without_accumulate(strategy, accumulate):
    engine = start(strategy, accumulate)
    for batch in batches(3, samples=8):
        for part in halves(batch):
            engine.backward(engine(*training.rank_part(part, 0)))
        assert engine.step() is True
    weights = engine.state_dict()
    engine.close()
    return weights


@every_strategy
def test_several_backwards_add_up(strategy, pools):
    weights = pools(2).run(step_without_accumulate, strategy, 1)[0]
    assert_same(weights, plain_adamw([halves(batch) for batch in batches(3, samples=8)]))


def two_losses(strategy):
    engine = start(strategy)
    for batch in batches(3, samples=8):
        first, second = (engine(*training.rank_part(part, 0)) for part in halves(batch))
        engine.backward(first)
        engine.backward(second)
        assert engine.step() is True
    weights = engine.state_dict()
    engine.close()
    return weights


@every_strategy
def test_two_forwards_then_two_backwards(strategy, pools):
    weights = pools(2).run(two_losses, strategy)[0]
    assert_same(weights, plain_adamw([halves(batch) for batch in batches(3, samples=8)]))


def summed_loss(strategy):
    engine = start(strategy)
    for batch in batches(3, samples=8):
        first, second = (engine(*training.rank_part(part, 0)) for part in halves(batch))
        engine.backward(first + second)
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


@every_strategy
def test_two_forwards_one_backward(strategy, pools):
    weights = pools(2).run(summed_loss, strategy)[0]
    assert_same(weights, plain_adamw([halves(batch) for batch in batches(3, samples=8)]))


def backward_in_no_sync(strategy):
    engine = start(strategy)
    for batch in batches(3, samples=8):
        first, second = halves(batch)
        with engine.no_sync():
            engine.backward(engine(*training.rank_part(first, 0)))
        engine.backward(engine(*training.rank_part(second, 0)))
        assert engine.step() is True
    weights = engine.state_dict()
    engine.close()
    return weights


@every_strategy
def test_no_sync(strategy, pools):
    weights = pools(2).run(backward_in_no_sync, strategy)[0]
    assert_same(weights, plain_adamw([halves(batch) for batch in batches(3, samples=8)]))


# ---- reading and editing the model


def interleaved_evaluation(strategy):
    engine = start(strategy)
    losses = []
    for batch in batches():
        engine.eval()
        with torch.no_grad():
            losses.append(engine(*batch).item())
        engine.train()
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()
    with torch.inference_mode():
        losses.append(engine(*batches()[0]).item())
    weights = engine.state_dict()
    engine.close()
    return losses, weights


@every_strategy
def test_evaluation_between_steps(strategy, pools):
    (ours, weights), (others, _) = pools(2).run(interleaved_evaluation, strategy)
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    theirs = []
    for batch in [*batches(), batches()[0]]:
        theirs.append(model(*batch).item())
        if len(theirs) <= STEPS:
            final = plain_steps(model, optimizer, [[batch]])
    assert ours == others
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert_same(weights, final)


class Scaled(nn.Module):
    """Has a method, an attribute and a forward with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.note = "mine"

    def forward(self, x, *, factor=1.0):
        return {"loss": factor * self.layers(x).pow(2).mean()}

    def describe(self, times):
        return self.note * times


def fall_through():
    model = Scaled()
    engine = initialize(model, {"strategy": "zero3"})
    assert engine.note == "mine" and engine.describe(2) == "minemine"
    assert {name for name, _ in engine.named_parameters()} == {
        "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    assert model.training and engine.training
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    x = torch.ones(2, 5)
    one, three = engine(x)["loss"], engine(x, factor=3.0)["loss"]
    assert three.item() == pytest.approx(3 * one.item())
    engine.close()


def test_attributes_and_arguments_fall_through(pools):
    pools(2).run(fall_through)


def gathered(strategy):
    model = models.build("gpt")
    engine = initialize(model, Case(strategy).config())
    first = model.blocks[0].up.weight
    with engine.gathered():
        same = torch.equal(first, models.build("gpt").blocks[0].up.weight)
    with engine.gathered([first]):
        assert torch.equal(first, models.build("gpt").blocks[0].up.weight)
    with engine.gathered(write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank() + 0.25)
    with engine.gathered():
        values = {float(v) for p in model.parameters() for v in p.unique()}
    weights = engine.state_dict()
    kept = sorted({float(v) for tensor in weights.values() for v in tensor.unique()})
    batch = batches(1)[0]
    engine.backward(engine(*training.rank_part(batch, 0)))  # training goes on
    engine.step()
    engine.close()
    return same, values, kept


@every_strategy
def test_gathered(strategy, pools):
    (same, values, kept), (others_same, others, nothing) = pools(2).run(gathered, strategy)
    assert same and others_same
    assert values == others == {0.25}
    assert kept == [0.25] and nothing == []


def full_gradients(strategy, accumulate):
    engine = start(strategy, accumulate, precision="bf16")
    batch = batches(1, samples=2 * training.MICRO * accumulate)[0]
    training.backwards(engine, batch, accumulate)
    gradients = engine.full_grads()
    again = engine.full_grads()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    engine.step()
    norm = engine.grad_norm
    engine.close()
    return gradients, norm


@pytest.mark.parametrize("accumulate", [1, 2])
@every_strategy
def test_full_grads_are_what_step_uses(strategy, accumulate, pools):
    (first, norm), (second, _) = pools(2).run(full_gradients, strategy, accumulate)
    assert compare.gradient_deviation(first, second) == 0
    assert all(g.dtype == torch.float32 for g in first.values())
    assert norm == pytest.approx(compare.norm(first), rel=1e-5)


def state_dicts(strategy):
    engine = start(strategy, precision="bf16", model="awkward")
    ours = engine.state_dict()
    engine.close()
    return ours


@every_strategy
def test_state_dict(strategy, pools):
    ours, others = pools(2).run(state_dicts, strategy)
    theirs = models.build("awkward").state_dict()
    assert others == {}
    assert list(ours) == list(theirs)  # tied names and buffers included
    frozen = {name for name, p in models.build("awkward").named_parameters() if not p.requires_grad}
    for name, tensor in theirs.items():
        if name in frozen:  # no master behind it
            tensor = tensor.bfloat16().float()
        assert ours[name].dtype == torch.float32 and torch.equal(ours[name], tensor), name


def explained(strategy):
    engine = start(strategy, accumulate=2)
    for batch in batches(2, samples=4 * training.MICRO):
        training.backwards(engine, batch, 2)
        engine.step()
    texts = str(engine.ledger()), str(engine.explain())
    engine.close()
    return texts


@every_strategy
def test_ledger_and_explain(strategy, pools):
    ledger, explain = pools(2).run(explained, strategy)[0]
    for word in ("param", "grad", "optim", "predicted", "measured"):
        assert word in ledger.lower(), f"{word} is not in:\n{ledger}"
    for word in (strategy, "forward u", "norm", "update u", "blocks.0"):
        assert word in explain, f"{word} is not in:\n{explain}"


# ---- optimizers and schedules


def two_groups(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "lr": 2e-3, "weight_decay": 0.2},
        {"params": vectors, "lr": 5e-3, "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, eps=1e-4, betas=(0.8, 0.95)),
    "Adam": functools.partial(torch.optim.Adam, eps=1e-4),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, eps=1e-4),
    "RMSprop": functools.partial(torch.optim.RMSprop, eps=1e-4, momentum=0.5),
}


def own_optimizer(strategy, kind, way):
    model = models.build("gpt")
    make = OPTIMIZERS[kind]
    optimizer = make(two_groups(model)) if way == "object" else lambda params: make(params, lr=2e-3)
    config = {"strategy": strategy, "precision": "fp32", "comm": {"timeout_s": 60}}
    engine = initialize(model, config, optimizer=optimizer)
    for batch in batches():
        engine.backward(engine(*training.rank_part(batch, 0)))
        assert engine.step() is True
    weights = engine.state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("kind", OPTIMIZERS)
@every_strategy
def test_optimizer_object_with_groups(strategy, kind, pools):
    weights = pools(2).run(own_optimizer, strategy, kind, "object")[0]
    model = models.build("gpt")
    optimizer = OPTIMIZERS[kind](two_groups(model))
    assert_same(weights, plain_steps(model, optimizer, [[batch] for batch in batches()]))


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
@every_strategy
def test_optimizer_callable(strategy, kind, pools):
    weights = pools(2).run(own_optimizer, strategy, kind, "callable")[0]
    model = models.build("gpt")
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=2e-3)
    assert_same(weights, plain_steps(model, optimizer, [[batch] for batch in batches()]))


CLIPPED = {"clip": 0.25, "precision": "bf16", "batch": {"accumulate": 2}}


def any_optimizer_clipped(kind):
    """A torch optimizer that Penstock knows, or a subclass that it must leave to itself."""

    class Mine(torch.optim.AdamW):
        pass

    model = models.build("gpt")
    make = torch.optim.AdamW if kind == "known" else Mine
    optimizer = make(model.parameters(), **training.ADAMW)
    config = {"strategy": "zero2", "comm": {"timeout_s": 60}} | CLIPPED
    engine = initialize(model, config, optimizer=optimizer)
    for batch in batches(samples=4 * training.MICRO):
        training.backwards(engine, batch, 2)
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


def test_any_optimizer_gets_the_clipped_averaged_gradient(pools):
    known, mine = (pools(2).run(any_optimizer_clipped, kind)[0] for kind in ("known", "mine"))
    # The same fp32 masters, but two roundings apart here and there, which bf16 forwards amplify.
    assert_same(mine, known, limit=1e-3)


def scheduled_by_torch(strategy, kind):
    model = models.build("gpt")
    optimizer = OPTIMIZERS[kind](two_groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.25)
    config = {"strategy": strategy, "precision": "fp32", "batch": {"accumulate": 2}}
    engine = initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    for batch in batches(samples=4 * training.MICRO):
        training.backwards(engine, batch, 2)
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_torch_scheduler(kind, pools):
    weights, rates = pools(2).run(scheduled_by_torch, "zero3", kind)[0]
    model = models.build("gpt")
    optimizer = OPTIMIZERS[kind](two_groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.25)
    steps = [[batch] for batch in batches(samples=4 * training.MICRO)]
    assert_same(weights, plain_steps(model, optimizer, steps, scheduler))
    assert rates == [group["lr"] for group in optimizer.param_groups]


WARM = {"type": "cosine", "warmup_steps": 3, "total_steps": 8, "min_ratio": 0.1}


def warm_factor(step):
    """As documented for `schedule`; `step` counts from 1."""
    if step <= WARM["warmup_steps"]:
        return step / WARM["warmup_steps"]
    done = (step - WARM["warmup_steps"]) / (WARM["total_steps"] - WARM["warmup_steps"])
    low = WARM["min_ratio"]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def scheduled_by_config(strategy):
    engine = start(strategy, schedule=WARM)
    for batch in batches(10):
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()
    weights = engine.state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_schedule_of_the_config(strategy, pools):
    weights = pools(2).run(scheduled_by_config, strategy)[0]
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: warm_factor(done + 1))
    steps = [[batch] for batch in batches(10)]
    assert_same(weights, plain_steps(model, optimizer, steps, scheduler))


# ---- configs and life


def config_forms(path):
    config = Case("zero2").config()
    weights = []
    for form in (config, json.dumps(config), path, None):
        overrides = config if form is None else {}
        engine = initialize(models.build("gpt"), form, **overrides)
        engine.backward(engine(*training.rank_part(batches(1)[0], 0)))
        engine.step()
        weights.append(engine.state_dict())
        engine.close()
    return weights


def test_config_as_dict_text_path_and_overrides(pools, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Case("zero2").config()))
    weights = pools(2).run(config_forms, str(path))[0]
    for other in weights[1:]:
        assert_same(other, weights[0], limit=0)


def override_wins():
    model = models.build("gpt")
    engine = initialize(model, Case("zero3", accumulate=4).config(), batch={"accumulate": 1})
    engine.backward(engine(*training.rank_part(batches(1)[0], 0)))
    applied = engine.step()
    engine.close()
    return applied


def test_override_replaces_a_top_level_key(pools):
    assert pools(2).run(override_wins) == [True, True]


def closed_model(strategy, precision):
    model = models.build("gpt")
    ids = [id(parameter) for parameter in model.parameters()]
    engine = initialize(model, Case(strategy, precision).config())
    for batch in batches(2):
        engine.backward(engine(*training.rank_part(batch, 0)))
        engine.step()
    weights = engine.state_dict()
    engine.close()
    engine.close()  # again: nothing to do
    assert ids == [id(parameter) for parameter in model.parameters()]
    loss = model(*batches(1)[0])  # the plain model works, and trains
    loss.backward()
    assert model.blocks[0].up.weight.grad is not None
    return weights, {n: p.detach().float() for n, p in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_strategy
def test_close_leaves_a_usable_model(strategy, precision, pools):
    (weights, first), (_, second) = pools(2).run(closed_model, strategy, precision)
    assert_same(second, first, limit=0)
    assert_same(first, weights, limit=0 if precision == "fp32" else 2**-8)


def texts_of(precision):
    engine = start("zero3", precision=precision)
    opened = repr(engine)
    engine.backward(engine(*training.rank_part(batches(1)[0], 0)))
    engine.step()
    settings = json.loads(repr(engine.config))
    engine.close()
    return opened, repr(engine), settings


@pytest.mark.parametrize("precision", ["bf16", None])
def test_engine_and_config_as_text(precision, pools):
    count = sum(p.numel() for p in models.build("gpt").parameters())
    opened, closed, settings = pools(2).run(texts_of, precision)[0]
    said = f"strategy=zero3 precision={precision or 'as-built'} ranks=2 parameters={count}"
    assert opened == f"<penstock.Engine {said} steps=0>"
    assert closed == f"<penstock.Engine {said} steps=1 closed>"
    assert settings["strategy"] == "zero3" and settings["mesh"]["data"] == 2


def test_text_of_an_engine_that_did_not_start():
    import penstock  # noqa: PLC0415

    assert "penstock.Engine" in repr(object.__new__(penstock.Engine))


def test_one_forward_around_another():
    from penstock.front import forward_guard  # noqa: PLC0415

    module, seen = torch.nn.Linear(2, 2), []

    def noting(name):
        def call(inner, *args):
            seen.append(name)
            return inner(*args)

        return call

    first = forward_guard.Forward(module, noting("first"))
    second = forward_guard.Forward(module, noting("second"))
    module(torch.ones(1, 2))
    assert seen == ["second", "first"]
    second.remove()
    first.remove()
    assert "forward" not in vars(module)
