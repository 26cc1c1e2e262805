"""At the border with users' code: a backward of a pipeline that reaches nothing that trains is not
part of the window, as on data ranks.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import pipeline_models as models
import pytest
import torch
from test_pipeline_life import LIMIT, far, start, weights_of
from test_pipeline_state import SCHEDULES

pytestmark = pytest.mark.timeout(480)

MICRO = 4


class Losses:
    """The losses of micro-batches: E reaches nothing that trains."""

    def __init__(self, kinds: str) -> None:
        self.kinds, self.calls = kinds, 0

    def __call__(self, outputs: torch.Tensor, _part: object) -> torch.Tensor:
        kind = self.kinds[self.calls]
        self.calls += 1
        if kind == "R":
            return outputs
        return outputs.detach() * torch.ones((), requires_grad=True)


def reaches_nothing(kinds, strategy, config):
    model, plain = models.build(), models.build()
    engine = start(model, strategy, batch={"accumulate": MICRO}, **config)
    said = []
    data = [models.batch(step, 0, MICRO) for step in range(2)]
    engine.train_batch(data[0], Losses("R" * MICRO))  # step one has plans of its own
    engine.train_batch(data[1], Losses(kinds))
    applied = [engine.steps]
    if engine.steps == 1:
        calls = [lambda: engine.train_batch(data[0])] if "R" in kinds else []
        for call in (*calls, lambda: engine.step(True)):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
    applied.append(engine.steps)
    engine.close()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for batch, each in zip(data, ["R" * MICRO, kinds], strict=True):
        optimizer.zero_grad()
        counted = max(1, each.count("R"))
        for part, kind in zip(models.parts(batch, MICRO), each, strict=True):
            if kind == "R":
                (plain(**part) / counted).backward()
        optimizer.step()
    return applied, said, far(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
@pytest.mark.parametrize("kinds", ["RRRR", "ERRR", "RERE", "RRRE", "EEEE"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_reaches_nothing(strategy, kinds, config, pools):
    count = kinds.count("R")
    for applied, said, difference in pools(2).run(reaches_nothing, kinds, strategy, config):
        assert applied == ([2, 2] if count == MICRO else [1, 2] if count else [1, 1])
        if 0 < count < MICRO:
            assert "the last window was not applied" in said[0]
        if count == 0:
            assert "no backward has reached" in said[-1]
        assert difference < LIMIT
