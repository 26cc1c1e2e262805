"""A loss that is not connected to the model, for example of a batch without valid samples: its
backward gives nothing, and other ranks and backwards count as in torch.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_border import SGD, assert_close, build, data, every_strategy, loss_of, mine, start

# By backward: the ranks whose loss is a constant.
STEPS = {
    "one-rank": ["1", "", "0", ""],
    "all": ["01", "", "01", ""],
    "all-later": ["", "01", "", "01"],
    "mixed": ["", "01", "1", "0"],
}


def _constant():
    return torch.tensor(0.0, requires_grad=True)


def disconnected(strategy, what, accumulate):
    engine = start(strategy, batch={"accumulate": accumulate, "reduction": "sum"})
    rank, applied = dist.get_rank(), []
    for batch, ranks in enumerate(STEPS[what]):
        loss = loss_of(engine, *mine(batch))
        engine.backward(_constant() if str(rank) in ranks else loss)
        applied.append(engine.step())
    if accumulate == 2 and not applied[-1]:
        engine.step(force=True)
    state = engine.state_dict()
    engine.close()
    return applied, state


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("what", STEPS)
@every_strategy
def test_disconnected(strategy, what, accumulate, pools):
    applied, state = pools(2).run(disconnected, strategy, what, accumulate, timeout=180)[0]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    expected, seen = [], 0
    for batch, ranks in enumerate(STEPS[what]):
        x, y = data(batch)
        for rank, half in enumerate((slice(0, 2), slice(2, 4))):
            loss = loss_of(model, x[half], y[half])
            (_constant() if str(rank) in ranks else loss / 2).backward()
        seen += ranks != "01"  # no rank had a gradient
        expected.append(seen == accumulate)
        if expected[-1]:
            optimizer.step()
            optimizer.zero_grad()
            seen = 0
    if not expected[-1]:
        optimizer.step()
    assert applied == expected
    assert_close(state, model.state_dict())


def plain_backward(strategy):
    """`loss.backward()` does not tell the engine of a backward that reaches nothing."""
    import penstock  # noqa: PLC0415

    engine = start(strategy)
    loss_of(engine, *mine(0))
    _constant().backward()
    with pytest.raises(penstock.RuntimeFault) as caught:
        engine.step()
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_plain_backward(strategy, pools):
    for text in pools(2).run(plain_backward, strategy, timeout=180):
        assert "reached a parameter" in text
        assert "0 * output.sum()" in text
