"""bf16 moments: which `beta2` lets a second moment fall (docs/training.md)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock


def second_moment_after_zeros(beta2: float, dtype: str) -> float:
    """The largest second moment after 100 steps without a gradient, divided by its first value."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = {"lr": 1e-4, "betas": [0.9, beta2], "weight_decay": 0.0, "moments_dtype": dtype}
    engine = penstock.initialize(model, {"strategy": "ddp", "optimizer": optimizer})
    inputs = torch.randn(4, 8)
    largest = []
    for step in range(101):
        engine.backward(engine(inputs).square().mean() * (1.0 if step == 0 else 0.0))
        assert engine.step()
        if step in (0, 100):
            largest.append(engine.param_state(model.weight, "exp_avg_sq").max().item())
    engine.close()
    return largest[1] / largest[0]


@pytest.mark.parametrize(
    ("beta2", "dtype", "stays"),
    [(0.99, "bf16", False), (0.999, "bf16", True), (0.999, "fp32", False)],
)
def test_second_moments_fall(beta2, dtype, stays):
    left = second_moment_after_zeros(beta2, dtype)
    if stays:
        assert left == 1.0
    else:
        assert left == pytest.approx(beta2**100, rel=0.1)
