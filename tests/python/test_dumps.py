"""Timelines that an engine writes after errors: not again for each error that a script catches."""

from __future__ import annotations

import pytest
import torch

import penstock

RAISES = ("forward", "backward")


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.raises = torch.nn.Linear(4, 1), ""

    def forward(self, x):
        x = self.linear(x)
        if self.raises == "forward":
            raise ValueError("in forward")
        return (Bad.apply(x) if self.raises == "backward" else x).sum()


def written(folder):
    return [file.stat().st_mtime_ns for file in folder.glob("penstock-rank0-pid*.trace.json")]


def train(engine):
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()


def test_caught_errors_write_one_dump_of_a_kind(tmp_path, capfd):
    model = Model()
    engine = penstock.initialize(model, {"comm": {"report_dir": str(tmp_path)}})
    train(engine)
    assert written(tmp_path) == []
    times = set()
    for model.raises in RAISES:
        for _ in range(20):
            with pytest.raises(ValueError, match="in " + model.raises):
                train(engine)
            times.update(written(tmp_path))
    assert len(times) == len(RAISES)
    before = written(tmp_path)
    engine.close()  # the error that ended the engine was not the first of its kind
    assert written(tmp_path) > before
    assert capfd.readouterr().err.count("the last steps are in") == 1


def test_an_engine_that_went_on_writes_none_at_its_end(tmp_path):
    model = Model()
    engine = penstock.initialize(model, {"comm": {"report_dir": str(tmp_path)}})
    train(engine)
    model.raises = "forward"
    with pytest.raises(ValueError, match="in forward"):
        train(engine)
    model.raises = ""
    train(engine)
    before = written(tmp_path)
    engine.close()
    assert written(tmp_path) == before
