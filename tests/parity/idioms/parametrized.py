"""Parametrizations and pruning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_weight_norm, weight_norm

from idioms import nets
from idioms.parameters import then_train
from idioms.table import Group, either, refused

rows = Group("Parametrizations and pruning")
FP32 = ("fp32",)


class Symmetric(nn.Module):
    """Of a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + x.flip(-1) * 0.5


@rows("a parametrization put on before `initialize`")
def parametrized(t: Any) -> None:
    model = nets.build()
    parametrize.register_parametrization(model.blocks[1].up, "weight", Symmetric())
    parametrize.register_parametrization(model.leave, "weight", Symmetric())
    t.start(model)
    t.train(3)


@rows("a parametrization put on after `initialize`", sharded=either())
def parametrized_later(t: Any) -> None:
    def change(model: Any) -> None:
        parametrize.register_parametrization(model.blocks[1].up, "weight", Symmetric())

    then_train(t, change)


@rows("a parametrization taken off, its value kept", sharded=either())
def parametrization_off(t: Any) -> None:
    model = nets.build()
    parametrize.register_parametrization(model.blocks[1].up, "weight", Symmetric())
    t.start(model)
    t.train(1)
    parametrize.remove_parametrizations(model.blocks[1].up, "weight", leave_parametrized=True)
    t.train(2, start=1)


@rows("a parametrization taken off, its original kept", sharded=either())
def parametrization_back(t: Any) -> None:
    model = nets.build()
    parametrize.register_parametrization(model.blocks[1].up, "weight", Symmetric())
    t.start(model)
    t.train(1)
    parametrize.remove_parametrizations(model.blocks[1].up, "weight", leave_parametrized=False)
    t.train(2, start=1)


@rows("`parametrize.cached()` around the forward", sharded=either())
def parametrize_cached(t: Any) -> None:
    model = nets.build()
    parametrize.register_parametrization(model.blocks[1].up, "weight", Symmetric())
    t.start(model)
    for step in t.steps(3):
        with parametrize.cached():
            loss = t.loss(step)
        t.engine.backward(loss)
        t.engine.step()


@rows("`parametrizations.weight_norm` before `initialize`")
def weight_norm_new(t: Any) -> None:
    model = nets.build()
    parametrizations.weight_norm(model.blocks[1].up)
    t.start(model)
    t.train(3)


@rows(
    "`parametrizations.weight_norm` after `initialize`",
    refused("original"),
    sharded=refused(),
    alone=refused(),
)
def weight_norm_later(t: Any) -> None:
    then_train(t, lambda model: parametrizations.weight_norm(model.blocks[1].up))


@rows("`parametrizations.spectral_norm` before `initialize`", precision=FP32)
def spectral(t: Any) -> None:
    model = nets.build()
    torch.manual_seed(4)
    parametrizations.spectral_norm(model.blocks[1].up)
    t.start(model)
    t.train(3)


@rows("`parametrizations.orthogonal` before `initialize`", precision=FP32)
def orthogonal(t: Any) -> None:
    model = nets.build()
    torch.manual_seed(4)
    parametrizations.orthogonal(model.blocks[1].up, use_trivialization=False)
    t.start(model)
    t.train(3)


@rows("the old `nn.utils.weight_norm` before `initialize`", precision=FP32)
def weight_norm_old(t: Any) -> None:
    model = nets.build()
    weight_norm(model.blocks[1].up)
    t.start(model)
    t.train(3)


@rows("the old `nn.utils.weight_norm`, removed later", refused("weight"), precision=FP32)
def weight_norm_removed(t: Any) -> None:
    model = nets.build()
    weight_norm(model.blocks[1].up)
    t.start(model)
    t.train(1)
    remove_weight_norm(model.blocks[1].up)
    if t.plain:
        return  # a parameter that no optimizer has
    t.train(2, start=1)


@rows("the old `nn.utils.spectral_norm` before `initialize`", precision=FP32)
def spectral_old(t: Any) -> None:
    model = nets.build()
    torch.manual_seed(4)
    nn.utils.spectral_norm(model.blocks[1].up)
    t.start(model)
    t.train(3)


@rows("`prune.l1_unstructured` before `initialize`", precision=FP32)
def pruned(t: Any) -> None:
    model = nets.build()
    prune.l1_unstructured(model.blocks[1].up, "weight", 0.5)
    prune.ln_structured(model.enter, "weight", 0.25, 2, 0)
    t.start(model)
    t.train(3)


@rows("`prune.random_unstructured` after `initialize`", sharded=either())
def pruned_later(t: Any) -> None:
    def change(model: Any) -> None:
        torch.manual_seed(4)
        prune.random_unstructured(model.blocks[1].up, "weight", 0.5)

    then_train(t, change)


@rows("`prune.remove` after training", sharded=either(), precision=FP32)
def prune_removed(t: Any) -> None:
    model = nets.build()
    prune.l1_unstructured(model.blocks[1].up, "weight", 0.5)
    t.start(model)
    t.train(2)
    prune.remove(model.blocks[1].up, "weight")
    t.train(1, start=2)
