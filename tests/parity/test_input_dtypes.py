"""Inputs in another dtype than the parameters: torch's error has a note that says what to cast."""

from __future__ import annotations

import models
import pytest
import torch
from idioms import nets
from torch import nn

import penstock


class Made(nets.Net):
    """Makes a tensor in fp32 itself."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.leave(self.trunk(features).float())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(6), nn.Conv1d(6, 2, 1)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks(x)
        return x if y is None else self.conv(y.unsqueeze(-1))


X = torch.ones(2, 6)
LOW = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
CASES = {
    "an input": lambda engine, x, _: engine(x),
    "an input of the model": lambda engine, x, _: engine.module(x),
    "an input of a convolution": lambda engine, x, right: engine(right, y=x),
    "an input of a method": lambda engine, x, _: engine.module.forward(x),
    "without gradients": lambda engine, x, _: torch.no_grad()(engine)(x),
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("case", CASES)
def test_an_input_of_another_dtype(case, precision):
    model = models.fill(Plain())
    engine = penstock.initialize(model, {"strategy": "zero1", "precision": precision})
    right = X.to(next(model.parameters()).dtype)
    wrong = X.double() if precision == "fp32" else X
    with pytest.raises(RuntimeError, match="dtype|type") as caught:
        CASES[case](engine, wrong, right)
    (note,) = caught.value.__notes__
    given = "float64" if precision == "fp32" else "float32"
    assert f"x.to({LOW[precision]})" in note and f"are {given}" in note.replace("and ", ""), note
    engine(right)
    engine.close()


def alone() -> list[str]:
    engine = penstock.initialize(nets.build(), {"strategy": "zero3", "precision": "bf16"})
    with pytest.raises(RuntimeError) as caught:
        engine.module.blocks[0].up(torch.ones(2, nets.WIDTH))
    with pytest.raises(RuntimeError) as block:
        engine.module.blocks[0](torch.ones(2, nets.WIDTH))
    engine.close()
    return [note for one in (caught, block) for note in getattr(one.value, "__notes__", [])]


def test_an_input_of_a_block_that_is_called_alone(pools):
    for notes in pools(2).run(alone):
        assert notes and all("x.to(torch.bfloat16)" in note for note in notes)


def test_a_tensor_that_the_forward_makes():
    engine = penstock.initialize(nets.build(Made), {"strategy": "zero1", "precision": "bf16"})
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(2, nets.FEATURES).bfloat16())
    assert "x.to(torch.bfloat16)" in caught.value.__notes__[0]
    assert "Inputs of this forward" not in caught.value.__notes__[0]
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("no such shape"), ValueError("a dtype")])
def test_other_errors_have_no_note(error):
    model = nets.build()
    engine = penstock.initialize(model, {"strategy": "zero1", "precision": "bf16"})

    def fail(*_: object) -> None:
        raise error

    model.blocks[0].register_forward_hook(fail)
    with pytest.raises(type(error)) as caught:
        engine(torch.ones(2, nets.FEATURES))
    assert not getattr(caught.value, "__notes__", [])
    engine.close()
