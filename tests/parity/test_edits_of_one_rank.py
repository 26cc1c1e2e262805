"""Edits that autograd does not see (`.data`, `.numpy()`), in a forward or backward of one rank
alone: the parameters are gathered copies there, so each rank checks its own. Also what an error of
a step that was refused says.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import zoo
from ranks import Failure
from test_border import Net, loss_of, mine, models, start
from torch import nn

EDITS = {
    "copy": lambda p: p.data.copy_(p.data * 2),
    "scale": lambda p: p.data.mul_(0.5),
    "first-half": lambda p: p.data.view(-1)[: p.numel() // 2].mul_(0.5),
    "second-half": lambda p: p.data.view(-1)[p.numel() // 2 :].mul_(0.5),
    "row": lambda p: p.data[1].fill_(0.5),
    "mask": lambda p: p.data.masked_fill_(p.data > p.data.max() * 0.9, 0.0),
    "numpy": lambda p: p.detach().numpy().__setitem__((3, 1), 1.0),
    "element": lambda p: p.data.view(-1)[0].fill_(1.0),
    "last": lambda p: p.data.view(-1)[-1].fill_(1.0),
    "signs": lambda p: p.data.neg_(),
}


class Wide(Net):
    """Its blocks have a weight with more values than a print."""

    def __init__(self):
        super().__init__()
        wide = nn.Linear(zoo.HIDDEN, 400), nn.Tanh(), nn.Linear(400, zoo.HIDDEN)
        self.blocks.insert(1, nn.Sequential(*wide))


def edited(what, by, module, wide):
    model = models.fill(Wide() if wide else Net())
    engine = start("zero3", model=model, comm={"timeout_s": 15})
    weight = model.blocks[1][0].weight if wide else model.blocks[1].up.weight
    engine.backward(loss_of(engine, *mine(0)))
    assert engine.step()

    def edit(*_):
        EDITS[what](weight)

    if dist.get_rank() == by and module == "forward":
        model.blocks[1].register_forward_pre_hook(edit)
    elif dist.get_rank() == by:
        model.blocks[1].up.register_forward_hook(
            lambda _m, _i, out: out.register_hook(edit) and None
        )
    engine.backward(loss_of(engine, *mine(1)))
    engine.step()


def check(pools, *run):
    outcomes = pools(2).attempt(edited, *run, timeout=180)
    assert all(isinstance(outcome, Failure) for outcome in outcomes), outcomes
    text = outcomes[run[1]].text
    assert (
        "was changed in place" in text and '"blocks.1.' in text and "gathered(write=True)" in text
    )


@pytest.mark.parametrize("what", EDITS)
def test_edited(what, pools):
    check(pools, what, 1, "forward", False)


def test_edited_in_backward(pools):
    check(pools, "scale", 1, "backward", False)


@pytest.mark.parametrize("what", ["first-half", "second-half"])
def test_edited_large(what, pools):
    """Values at equal distances are compared: an edit of many is found, of one perhaps not."""
    check(pools, what, 1, "forward", True)


def refused_step(strategy):
    """No parameter has changed, so close() has nothing to warn of."""
    import penstock  # noqa: PLC0415

    engine = start(strategy)
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine.module.lift.weight.mul_(0.5)
    engine.backward(loss_of(engine, *mine(0)))
    with pytest.raises(penstock.RuntimeFault) as caught:
        engine.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.close()
    return str(caught.value), [str(one.message) for one in said]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_refused_step(strategy, pools):
    for text, said in pools(2).run(refused_step, strategy, timeout=180):
        assert "has different values on rank" in text and "max_norm" in text
        assert said == []
