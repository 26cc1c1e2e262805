"""Optimizers that know their parameters by id or as objects beside `param_groups`: a shard is
another tensor, so each is refused at initialize(). Choices by option or by attribute work."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch import nn

import penstock


class Own(torch.optim.Optimizer):
    """Decays the parameters that `decays` says."""

    def __init__(self, params, keep):
        super().__init__(params, {"lr": 0.1})
        biases = [p for g in self.param_groups for p in g["params"] if p.ndim == 1]
        keep(self, biases)

    def decays(self, group, p):
        return not group.get("plain") and not getattr(p, "plain", False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.decays(group, p):
                    p.mul_(0.5)
                p.add_(p.grad, alpha=-group["lr"])


class Holder:
    def __init__(self, held):
        self.held = held


def attribute(make):
    return lambda optimizer, biases: setattr(optimizer, "kept", make(biases))


def option(make):
    return lambda optimizer, biases: optimizer.param_groups[0].update(kept=make(biases))


def closure(biases):
    ids = {id(p) for p in biases}
    return lambda p: id(p) in ids


REFUSED = {
    "set": (attribute(lambda b: {id(p) for p in b}), 'attribute "kept"'),
    "dict": (attribute(lambda b: {id(p): 0.5 for p in b}), 'attribute "kept"'),
    "list": (attribute(lambda b: [id(p) for p in b]), 'attribute "kept"'),
    "nested": (attribute(lambda b: {"a": [{"b": frozenset(map(id, b))}]}), 'attribute "kept"'),
    "object": (attribute(lambda b: Holder({id(p) for p in b})), 'attribute "kept"'),
    "closure": (attribute(closure), 'attribute "kept"'),
    "partial": (attribute(lambda b: functools.partial(print, [*map(id, b)])), 'attribute "kept"'),
    "option": (option(lambda b: [id(p) for p in b]), 'option "kept" of a group'),
    "option-params": (option(lambda b: {"a": [*b]}), 'option "kept" of a group'),
    "option-keys": (option(lambda b: dict.fromkeys(b, 0.5)), 'option "kept" of a group'),
    "defaults": (lambda o, b: o.defaults.update(kept=id(b[0])), 'attribute "defaults"'),
    "state": (lambda o, b: o.state.update({id(b[0]): {"n": 1}}), "state"),
    "objects": (attribute(lambda b: {*b}), 'attribute "kept"'),
    "keys": (attribute(lambda b: dict.fromkeys(b, 0.5)), 'attribute "kept"'),
    "weak": (attribute(lambda b: weakref.WeakSet(b)), 'attribute "kept"'),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    keep, place = REFUSED[what]
    model = build()
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.initialize(
            model, {"strategy": "zero1"}, optimizer=Own([*model.parameters()], keep)
        ).close()
    assert place in str(caught.value)
    assert "[front::initialize]" in str(caught.value)


def _marks(_optimizer, biases):
    for p in biases:
        p.plain = True


def _groups(optimizer, biases):
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p.ndim > 1]
    optimizer.add_param_group({"params": biases, "plain": True})


TAKEN = {
    "attribute": _marks,
    "group": _groups,
    "numbers": attribute(lambda b: {"sizes": [p.numel() for p in b], "step": 0}),
}


@pytest.mark.parametrize("what", TAKEN)
def test_taken(what):
    models = [build(), build()]
    optimizers = [Own([*model.parameters()], TAKEN[what]) for model in models]
    engine = penstock.initialize(models[0], {"strategy": "zero1"}, optimizer=optimizers[0])
    x = torch.ones(3, 4)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.close()
    models[1](x).square().mean().backward()
    optimizers[1].step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def _sgd(model, value):
    """torch's SGD with a momentum buffer that is there before the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p] = {"momentum_buffer": torch.full_like(p, value)}
    return optimizer


def test_state_of_zeros():
    models = [build(), build()]
    optimizers = [_sgd(model, 0.0) for model in models]
    engine = penstock.initialize(models[0], {"strategy": "zero1"}, optimizer=optimizers[0])
    x = torch.ones(3, 4)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.close()
    for _ in range(2):
        optimizers[1].zero_grad()
        models[1](x).square().mean().backward()
        optimizers[1].step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_state_that_was_set():
    model = build()
    with pytest.raises(penstock.ConfigError, match="or its state was set"):
        penstock.initialize(model, {"strategy": "zero1"}, optimizer=_sgd(model, 1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int8])
def test_dtypes_name_a_remedy(dtype):
    model = build()
    floats = dtype.is_floating_point or dtype.is_complex
    model.other = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=floats)
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.initialize(model, {"strategy": "zero1"})
    text = str(caught.value)
    assert '"other"' in text and "model.float()" in text and "register_buffer" in text
