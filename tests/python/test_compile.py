"""torch.compile beside the engine: the same numbers, no graph break and no recompile of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Enter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Entered(Net):
    """Two layers in a module that is compiled by itself, and one after the blocks."""

    def __init__(self):
        super().__init__()
        rest = [self._modules.pop(name) for name in ("blocks", "head")]
        self.enter, self.blocks, self.head = Enter(), *rest

    def forward(self, x):
        return super().forward(self.enter(x))


def in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def wrapped(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return model


def layers_in_place(model):
    model.enter.compile(backend="aot_eager", fullgraph=True)
    return model


def layers_wrapped(model):
    model.enter = torch.compile(model.enter, backend="aot_eager", fullgraph=True)
    model.head = torch.compile(model.head, backend="aot_eager", fullgraph=True)
    return model


def whole(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def whole_in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def eager(model):
    return model


RECOMPUTED = {"activations": {"checkpoint": "unit"}, "offload": {"activations": "host"}}


def train(how, strategy, steps=6, overrides=None, make=Net):
    import penstock  # noqa: PLC0415

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = how(make())
    engine = penstock.initialize(
        model, {"strategy": strategy, "optimizer": {"type": "SGD", "lr": 0.1}} | (overrides or {})
    )
    compiled, losses = [], []
    for step in range(steps):
        torch.manual_seed(step)
        loss = engine(torch.randn(64, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        compiled.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert compiled[1] == compiled[-1], f"compiled again after step two: {compiled}"
    assert how is eager or compiled[-1] > 0, "nothing was compiled"
    engine.close()
    return losses


WHOLE = [whole, whole_in_place]
CASES = [
    *((in_place, strategy) for strategy in ["ddp", "zero1", "zero2", "zero3"]),
    *((wrapped, strategy) for strategy in ["ddp", "zero3"]),
    *((how, strategy) for how in WHOLE for strategy in ["ddp", "zero2"]),
]


@pytest.mark.parametrize(("how", "strategy"), CASES)
def test_compiled(how, strategy, pools):
    expected, _ = pools(2).run(train, eager, strategy)
    losses, _ = pools(2).run(train, how, strategy)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("how", [layers_in_place, layers_wrapped])
def test_layers_that_are_units_in_compiled_code(how, strategy, pools):
    units = {"units": {"modules": ["Block"], "layer_bytes": 1}}
    expected, _ = pools(2).run(train, eager, strategy, 6, units, Entered)
    losses, _ = pools(2).run(train, how, strategy, 6, units, Entered)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("how", [in_place, wrapped])
def test_compiled_blocks_are_computed_again(how, strategy, pools):
    expected, _ = pools(2).run(train, eager, strategy)
    losses, _ = pools(2).run(train, how, strategy, 6, RECOMPUTED)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", WHOLE)
def test_a_model_compiled_whole_has_no_blocks_to_compute_again(how, pools):
    for failure in pools(2).attempt(train, how, "ddp", 6, RECOMPUTED):
        assert failure.is_a("ConfigError"), failure.trace
        assert "Compile its blocks" in failure.text
        assert "activations.checkpoint" in failure.text


@pytest.mark.parametrize("strategy", ["zero3"])
@pytest.mark.parametrize("how", WHOLE)
def test_moving_parameters_refuse_it(how, strategy, pools, record_property):
    for failure in pools(2).attempt(train, how, strategy):
        assert failure.is_a("ConfigError"), failure.trace
        assert "Compile its blocks" in failure.text
        record_property("refused", f"ConfigError: {failure.text}")
