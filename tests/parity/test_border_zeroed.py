"""`zero_grad(set_to_none=False)`: a parameter that had a gradient has a gradient of zeros, so an
optimizer with momentum or decay still changes it, as in torch.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import pytest
import torch
from test_border import FEATURES, Net, assert_close, data, loss_of, mine, models
from torch import nn


class Parts(Net):
    """Has a part that some steps do not use."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out = super().forward(features)
        return out + self.aside(features).squeeze(-1) if self.uses else out


class Decays(torch.optim.Optimizer):
    """Computes in Python."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9).add_(p.grad, alpha=-group["lr"])


class Zeroes(Decays):
    """Has a zero_grad() of its own."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


def _adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.2)


OPTIMIZERS = {
    "adamw": _adamw,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "foreach": lambda params: torch.optim.NAdam(params, lr=0.05),
    "own": Decays,
    "own-zero_grad": Zeroes,
}
CALLS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "then-none": lambda model, optimizer: [
        optimizer.zero_grad(set_to_none=False),
        optimizer.zero_grad(),
    ],
    "twice": lambda model, optimizer: [
        optimizer.zero_grad(set_to_none=False),
        model.zero_grad(set_to_none=False),
    ],
}
USES = [False, True, False, False, True, False]


def loop(model, optimizer, clear, batches, backward, step):
    for index, uses in enumerate(USES):
        clear(model, optimizer)
        model.uses = uses
        backward(loss_of(model, *batches(index)))
        step()


def zeroed(strategy, made, call, accumulate, offload):
    import penstock  # noqa: PLC0415

    model = models.fill(Parts())
    given = OPTIMIZERS[made](model.parameters())
    alone = torch.distributed.get_world_size() == 1
    engine = penstock.initialize(
        model,
        {"strategy": strategy, "batch": {"accumulate": accumulate}, "offload": offload},
        optimizer=given,
    )
    clear = (lambda *_: engine.zero_grad(set_to_none=False)) if call == "engine" else CALLS[call]
    batches = data if alone else mine
    loop(model, given, clear, batches, engine.backward, lambda: engine.step(force=True))
    state = engine.state_dict()
    engine.close()
    return state


def check(pool, strategy, made, call, accumulate=1, offload=None):
    run = (strategy, made, call, accumulate, offload or {})
    state = pool.run(zeroed, *run, timeout=180)[0]
    model = models.fill(Parts())
    optimizer = OPTIMIZERS[made](model.parameters())
    clear = CALLS["optimizer" if call == "engine" else call]
    loop(model, optimizer, clear, data, lambda loss: loss.backward(), optimizer.step)
    assert_close(state, model.state_dict())


@pytest.mark.parametrize("call", ["engine", *CALLS])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_zeroed(strategy, call, pools):
    check(pools(2), strategy, "adamw", call)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("made", ["momentum", "foreach", "own", "own-zero_grad"])
def test_zeroed_for_other_optimizers(made, strategy, pools):
    check(pools(2), strategy, made, "optimizer")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_zeroed_alone(strategy, pools):
    check(pools(1), strategy, "adamw", "optimizer")


def test_zeroed_in_windows(pools):
    check(pools(2), "zero2", "adamw", "optimizer", accumulate=2)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_zeroed_with_offload(tier, pools, tmp_path):
    offload = {"optimizer": tier, "gradients": tier}
    if tier == "disk":
        offload |= {"params": tier, "path": str(tmp_path)}
    check(pools(2), "zero3", "adamw", "engine", offload=offload)
