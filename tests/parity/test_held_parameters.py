"""Parameters that are held whole until backward, where something comes in between and ranks use
different units: as with those that are not held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.timeout(480)
HELD = {"table": {"param": {"hold": "RR@device:fp32"}}}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.left_out: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x = x + block(x).tanh()
        return x.square().mean()


def trains(held: bool, between: str) -> Any:
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "strategy": "zero3",
        "batch": {"accumulate": 2},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "eps": 1e-4},
        "units": {"modules": ["Linear"]},
        "comm": {"timeout_s": 20},
    }
    model = Blocks()
    engine = penstock.initialize(model, config | (HELD if held else {}))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        for micro in range(2):
            model.left_out = {(step + micro + dist.get_rank()) % 4} if step else set()
            loss = engine(torch.randn(3, 6, generator=generator))
            if between == "evaluation":
                model.left_out = set()
                with torch.no_grad():
                    engine(torch.ones(1, 6))
            elif between == "gathered":
                with engine.gathered():
                    pass
            engine.backward(loss)
            engine.step()
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return engine.grad_norm, {name: one.clone() for name, one in weights.items()}


@pytest.mark.parametrize("between", ["nothing", "evaluation", "gathered"])
def test_held_as_not_held(between, pools):
    for ours, theirs in zip(
        pools(2).run(trains, True, between), pools(2).run(trains, False, between), strict=True
    ):
        assert ours[0] == theirs[0]
        assert all(torch.equal(ours[1][name], one) for name, one in theirs[1].items())
