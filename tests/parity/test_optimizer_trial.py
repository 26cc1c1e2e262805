"""Optimizers that only seem elementwise, or work on other tensors than shards, are refused in the
layout "flat" at initialize(). test_whole_optimizers.py runs those that work on whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_optimizers_outside_step import Net, Own, of

FLAT = {"strategy": "zero3", "optimizer": {"layout": "flat"}}


class Late(Own):
    """Elementwise for four steps."""

    seen = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen += 1
        if self.seen == 5:
            for _, p, _ in self.each():
                p.mul_(1 - 0.1 * p.norm())


class Tiny(Own):
    """Its steps are small at first, and depend on the norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, state in self.each():
            if p.grad is not None:
                state["rate"] = 2 * state.get("rate", 1e-9)
                p.sub_(state["rate"] * p.grad / p.grad.norm())


class Kernels(Own):
    """Centralizes the gradients of convolutions."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, _ in self.each():
            if p.grad is not None and p.grad.ndim == 4:
                p.grad.sub_(p.grad.mean())
        super().step()


class Listed(Own):
    """Steps on the parameters that it was built with, not on those of its groups."""

    def __init__(self, params: Any):
        self.mine = list(params)
        super().__init__(self.mine)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.mine:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


class Nested(Own):
    """Another optimizer inside, with groups of its own."""

    def __init__(self, params: Any):
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.RMSprop(params, lr=0.01)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Idle(Own):
    def step(self, closure: Any = None) -> None:
        pass


class Replaces(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, _ in self.each():
            if p.grad is not None:
                p.data = p.data - group["lr"] * p.grad


class Normed(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, _ in self.each():
            if p.grad is not None:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


AT_START: dict[str, tuple[Callable[..., Any], str]] = {
    "after five steps": (Late, "Late is not elementwise"),
    "small steps": (Tiny, "Tiny is not elementwise"),
    "four dims": (Kernels, "Kernels is not elementwise"),
    "a list of its own": (Listed, "mine"),
    "an optimizer inside": (Nested, "inner"),
    "a step that does nothing": (Idle, "changed no parameter"),
    "p.data = x": (Replaces, "copy_"),
    "a learning rate of 0": (lambda params: Normed(params, lr=0.0), "Normed is not elementwise"),
}


@pytest.mark.parametrize("name", AT_START)
def test_refused_at_initialize(name):
    import penstock  # noqa: PLC0415

    make, words = AT_START[name]
    model = Net()
    before = of(model)
    with pytest.raises(penstock.ConfigError, match=words):
        penstock.initialize(model, FLAT, optimizer=make(model.parameters()))
    assert all(torch.equal(value, before[key]) for key, value in of(model).items())


class Projected(Own):
    """AdamP's rule (arXiv:2006.08217): projects if gradient and weights are nearly orthogonal."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, _ in self.each():
            if p.grad is not None and p.ndim > 1:
                along = (p * p.grad).sum() / (p.norm() * p.grad.norm())
                if along.abs() < 0.1 / p.numel() ** 0.5:
                    p.grad.sub_(p * (p * p.grad).sum() / p.square().sum())
        super().step()


class Latent(Own):
    """Keeps a norm in its state, which it uses after 100 steps."""

    def after(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        state["norm"] = p.norm()
        state["seen"] = state.get("seen", 0) + 1
        if state["seen"] > 100:
            p.div_(state["norm"])


class Reduces(Own):
    """Adds gradients up over the ranks by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, _ in self.each():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
        super().step()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Projected, "Projected is not elementwise"),
        (Latent, "its state depends on the whole parameter"),
        (lambda params: torch.optim.RMSprop([{"params": params, "lr": 0.0}]), ""),
    ],
)
def test_what_shows_rarely(make, words):
    import penstock  # noqa: PLC0415

    model = Net()
    if not words:  # a learning rate of 0 is no reason
        penstock.initialize(model, optimizer=make(model.parameters())).close()
        return
    with pytest.raises(penstock.ConfigError, match=words):
        penstock.initialize(model, FLAT, optimizer=make(model.parameters()))


def exchanging() -> str:
    import penstock  # noqa: PLC0415

    model = Net()
    try:
        penstock.initialize(model, {"strategy": "zero1"}, optimizer=Reduces(model.parameters()))
    except penstock.ConfigError as error:
        return str(error)
    return ""


def test_collectives_in_step(pools):
    for told in pools(2).run(exchanging):
        assert "Reduces" in told and "other ranks" in told
