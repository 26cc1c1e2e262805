"""Changes of a class that an engine cannot follow, and copies of a closed engine's model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import models
import pytest
import torch
from idioms import late_changes, nets
from torch import nn

import penstock

X = torch.linspace(-1, 1, 12).reshape(2, 6)


def other(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight) * 2


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_tiled_layer_with_another_forward_is_refused(strategy):
    model = models.fill(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)))
    plain = models.fill(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)))
    engine = penstock.initialize(model, {"strategy": strategy, "tiling": {"max_bytes": 400}})
    with (
        mock.patch.object(nn.Linear, "forward", other),
        pytest.raises(penstock.RuntimeFault, match='module "0" was replaced after initialize'),
    ):
        engine(X)
    torch.testing.assert_close(engine(X), plain(X))
    engine.close()


def test_a_copy_outlives_the_engine():
    """A copy that was made while the engine was open is a plain model after close()."""
    model = nets.build()
    engine = penstock.initialize(model, {"strategy": "zero1"})
    copied = late_changes.clone(model, lambda p: p.detach() * 2)
    engine.close()
    assert "forward" not in vars(model)
    plain = late_changes.clone(nets.build(), lambda p: p.detach() * 2)
    torch.testing.assert_close(copied(X), plain(X))
    torch.testing.assert_close(copied.forward(X), plain(X))


def test_a_method_that_is_given_to_another_module():
    """`other.forward = model.forward` computes with the model's weights, as in torch."""
    model, plain = nets.build(), nets.build()
    engine = penstock.initialize(model, {"strategy": "zero1"})
    holder, second = nn.Identity(), nets.build(nets.Net)
    with torch.no_grad():
        second.leave.bias.add_(1)
    holder.forward = second.forward = model.forward  # type: ignore[method-assign]
    for one in (holder, second):
        torch.testing.assert_close(one(X), plain(X))
    engine.close()
