"""Sequences that are computed in parts have the losses and gradients of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipe_models import deepspeed
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.timeout(480)
WIDTH, TOKENS, VOCAB = 8, 7, 11


class Net(nn.Module):
    def __init__(self, kind: str, mlp: Any, loss: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self._kind, self._mlp, self._loss = kind, mlp, loss

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(functional.dropout(x, 0.5))))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._loss(self, self._mlp(self, x), labels)


def summed(module: Net, x: torch.Tensor, y: torch.Tensor, mask: Any = None) -> torch.Tensor:
    losses = functional.cross_entropy(module.head(x).flatten(0, -2), y.flatten(), reduction="none")
    return (losses if mask is None else losses * mask.flatten()).sum()


def compared(kind: str, stage: int) -> float:
    """On a rank: the largest difference of loss and gradients from the whole sequence."""
    ds = deepspeed()
    from deepspeed.runtime.sequence_parallel import ulysses_sp as tiles  # noqa: PLC0415

    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, WIDTH)
    y = torch.randint(0, VOCAB, (2, TOKENS))
    mask = torch.rand(2, TOKENS) > 0.3

    def parts(module: Net, x: torch.Tensor) -> torch.Tensor:
        if kind == "mlp":
            return tiles.TiledMLP.apply(Net.part, module, x, 3, [module.up.weight])
        if kind == "once":
            return tiles.AutogradComputeMLP.apply(Net.part, module, x)
        return tiles.sequence_tiled_compute(
            Net.part, TOKENS, 3, {"x": x}, {"self": module}, "x", [], 1, None
        )

    def loss_parts(module: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "generic":
            return tiles.sequence_tiled_compute(
                lambda x, y: summed(module, x, y),
                TOKENS,
                3,
                {"x": x, "y": y},
                {},
                "x",
                [],
                0,
                "sum",
            )
        given = mask if kind == "once" else None
        return tiles.TiledFusedLogitsLoss.apply(summed, module, x, y, given, 3, [], "sum")

    def whole(module: Net, x: torch.Tensor) -> torch.Tensor:
        step = 3
        cut = [x] if kind == "once" else [x[:, i : i + step] for i in range(0, TOKENS, step)]
        return torch.cat([module.part(one) for one in cut], 1)  # the same random numbers

    def loss_whole(module: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return summed(module, x, y, mask if kind == "once" else None)

    found = []
    for mlp, loss in ((parts, loss_parts), (whole, loss_whole)):
        torch.manual_seed(2)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        }
        engine = ds.initialize(model=Net(kind, mlp, loss), config=config)[0]
        own = x.clone().requires_grad_(True)
        torch.manual_seed(4)
        made = engine(own, y)
        engine.backward(made)
        found.append([made.detach(), own.grad, *engine.native.full_grads().values()])
        engine.destroy()
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["mlp", "generic", "once"])
def test_parts_are_as_the_whole(kind, stage, drop_in_pools):
    assert max(drop_in_pools(1).run(compared, kind, stage)) < 1e-5


def refused() -> list[str]:
    deepspeed()
    from deepspeed.runtime.sequence_parallel import ulysses_sp as tiles  # noqa: PLC0415

    x, y = torch.ones(2, 4, 3), torch.ones(2, 4)
    told = []
    for call in (
        lambda: tiles.sequence_tiled_compute(
            lambda x: x, 4, 2, {"x": x}, {}, "x", [], output_reduction="max"
        ),
        lambda: tiles.TiledFusedLogitsLoss.apply(None, None, x, y[:1], None, 2, [], "sum"),
        lambda: tiles.TiledFusedLogitsLoss.apply(None, None, x, y, x, 2, [], "sum"),
        lambda: tiles.SequenceTiledCompute.apply(None),
        lambda: tiles.sequence_tiled_compute(lambda x: x, 5, 2, {"x": x}, {}, "x", []),
        lambda: tiles.sequence_tiled_compute(lambda x: x, 3, 2, {"x": x}, {}, "x", []),
        lambda: tiles.sequence_tiled_compute(lambda x: x, 4, 2, {"x": y[0]}, {}, "x", []),
    ):
        try:
            call()
        except (ValueError, AttributeError) as error:
            told.append(str(error))
    return told


def test_refused(drop_in_pools):
    (told,) = drop_in_pools(1).run(refused)
    assert "output_reduction is 'max'" in told[0]
    assert all("allowed: x and y of [batch" in text for text in told[1:3])
    assert "sequence_tiled_compute()" in told[3] and len(told) == 7
    assert "kwargs_to_shard have other shapes, {'x': (2, 4, 3)}" in told[4]
    assert "seqlen is 3" in told[5] and "allowed: [batch, seqlen, ...]" in told[6]


def uneven(shards: int) -> list[Any]:
    """Sizes of the parts of 5 tokens, and how far the joined output is from the whole."""
    deepspeed()
    from deepspeed.runtime.sequence_parallel import ulysses_sp as tiles  # noqa: PLC0415

    x, sizes = torch.randn(2, 5, 3), []

    def twice(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[1])
        return 2 * x

    options = {"output_unshard_dimension": 1, "output_reduction": None}
    made = tiles.sequence_tiled_compute(twice, 5, shards, {"x": x}, {}, "x", [], **options)
    return [sizes, float((made - 2 * x).abs().max())]


@pytest.mark.parametrize(
    ("shards", "sizes"), [(1, [5]), (2, [3, 2]), (4, [2, 2, 1]), (5, [1] * 5), (9, [1] * 5)]
)
def test_no_part_is_empty(shards, sizes, drop_in_pools):
    assert drop_in_pools(1).run(uneven, shards) == [[sizes, 0.0]]
