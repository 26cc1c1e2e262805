"""At the border with users' code: which backwards a window has, where ranks take different ways.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import SGD, Net, assert_close, data, every_strategy, mine, start
from torch.utils.checkpoint import checkpoint

HALVES = (slice(0, 2), slice(2, 4))


class Twice(Net):
    """Runs its middle block twice on rank 0, where its gradient comes in two parts."""

    rank = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.lift(features)
        for index, block in enumerate(self.blocks):
            for _ in range(2 if index == 1 and self.rank == 0 else 1):
                x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x).squeeze(-1)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def late_on_one_rank(strategy, accumulate, reads):
    model = models.fill(Twice())
    model.rank = dist.get_rank()
    alone = {"timeout_s": 30, "bucket_bytes": 0}  # each unit moves by itself, when it is complete
    engine = start(strategy, model=model, batch={"accumulate": accumulate}, comm=alone)
    gradients = []
    for step in range(3):
        for micro in range(accumulate):
            engine.backward(loss_of(engine, *mine(step + 3 * micro)))
        if reads:
            gradients.append(engine.full_grads())
        assert engine.step()
    state = engine.state_dict()
    engine.close()
    return gradients, state


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_late_on_one_rank(strategy, accumulate, reads, pools):
    gradients, state = pools(2).run(late_on_one_rank, strategy, accumulate, reads, timeout=240)[0]
    model = models.fill(Twice())
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x, y = data(step + 3 * micro)
            for model.rank, half in enumerate(HALVES):
                (loss_of(model, x[half], y[half]) / (2 * accumulate)).backward()
        if reads:
            assert_close(gradients[step], {n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    assert_close(state, model.state_dict())


class Probed(Net):
    """Its lift is frozen; what it made is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lift.requires_grad_(False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lifted = self.lift(features)
        return self.leave(self.blocks(lifted)).squeeze(-1), lifted


def backward_of(model, kind, x, y):
    """R: of the loss. E: what it reaches is frozen. The gradient to the input is computed."""
    x = x.clone().requires_grad_(kind == "E")
    out, lifted = model(x)
    loss = ((out - y) ** 2).mean() if kind == "R" else (lifted**2).sum()
    return loss, x


def micro_steps(strategy, kinds, accumulate, force, offload):
    batch = {"accumulate": accumulate}
    engine = start(strategy, model=models.fill(Probed()), batch=batch, offload=offload)
    applied = []
    for step, both in enumerate(kinds):
        kind = both[dist.get_rank() % len(both)]
        loss, x = backward_of(engine, kind, *mine(step))
        engine.backward(loss)
        assert (x.grad is not None) == (kind == "E")
        applied.append(engine.step(force=force and step == len(kinds) - 1))
    state = engine.state_dict()
    engine.close()
    return applied, state


# By backward: what it is on the ranks; how many of them a step takes; whether the last step is
# forced; which steps update.
WINDOWS = {
    "first": (["E", "R"], 1, False, [False, True]),
    "between": (["R", "E", "R", "R", "R"], 2, False, [False, False, True, False, True]),
    "last": (["R", "R", "E", "R", "R"], 2, False, [False, True, False, False, True]),
    "several": (["E", "E", "R", "E", "R", "R"], 3, False, [False] * 5 + [True]),
    "forced": (["R", "E"], 3, True, [False, True]),
    "forced-none": (["E", "E", "R"], 1, True, [False, False, True]),
    "on-one-rank": (["R", "ER", "RE", "R"], 2, False, [False, True, False, True]),
}


def check_micro_steps(pools, strategy, window, offload):
    kinds, accumulate, force, expected = WINDOWS[window]
    applied, state = pools(2).run(micro_steps, strategy, kinds, accumulate, force, offload)[0]
    assert applied == expected
    model = models.fill(Probed())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD["lr"])
    seen = 0
    for step, both in enumerate(kinds):
        x, y = data(step)
        for rank, half in enumerate(HALVES):
            loss, _ = backward_of(model, both[rank % len(both)], x[half], y[half])
            (loss / 2).backward()
        seen += both != "E"
        if not expected[step]:
            continue
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= seen
        optimizer.step()
        optimizer.zero_grad()
        seen = 0
    assert_close(state, model.state_dict())


@pytest.mark.parametrize("window", WINDOWS)
@every_strategy
def test_micro_steps(strategy, window, pools):
    """A backward that reaches no parameter that trains, on no rank, is none of the window's."""
    check_micro_steps(pools, strategy, window, {})


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("window", WINDOWS)
def test_micro_steps_with_offload(window, tier, pools, tmp_path):
    offload = {"optimizer": tier, "gradients": tier}
    if tier == "disk":
        offload |= {"params": tier, "path": str(tmp_path)}
    check_micro_steps(pools, "zero3", window, offload)


def uneven_windows(strategy):
    engine = start(strategy, batch={"accumulate": 4})
    for step in range(1 + dist.get_rank()):
        engine.backward(loss_of(engine, *mine(step)))
    engine.step(force=True)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_uneven_windows(strategy, pools):
    for failure in pools(2).attempt(uneven_windows, strategy):
        assert isinstance(failure, Failure), failure
        assert "different numbers of backwards" in failure.text
        assert "1 on rank 0, 2 on rank 1" in failure.text
