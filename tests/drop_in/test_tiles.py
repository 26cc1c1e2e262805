"""zero.TiledLinear: the same outputs, gradients and training as a whole layer."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pipe_models import deepspeed
from raised import raised
from test_sharded_models import WIDTH, Net, config, gap
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.timeout(480)

TILES = [
    (5, 4, 1, 1, True, {}),
    (5, 4, 5, 4, True, {}),
    (7, 5, 2, 3, False, {}),
    (7, 5, 3, 2, True, {"combine_out_splits": False}),
    (7, 5, 3, 2, True, {"input_is_already_split": True}),
]


class Separate(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x: torch.Tensor) -> Any:
        return functional.linear(x, self.weight), self.bias


def tiled(kind: str, shape: Any, options: dict[str, Any]) -> list[float]:
    """Differences between a whole layer and one in tiles: output, gradients of input and weight."""
    wide, high, columns, rows, bias = shape
    whole = nn.Linear(wide, high, bias=bias)
    options = options | ({} if kind == "TiledLinear" else {"linear_cls": Separate})
    tiles = getattr(deepspeed().zero, kind)(
        wide, high, bias, columns, rows, init_linear=whole, **options
    )
    x = torch.randn(3, wide, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    split = options.get("input_is_already_split")
    sizes = [b - a for a, b in itertools.pairwise(tiles.in_parts)]
    out = tiles(again.split(sizes, dim=-1) if split else again)
    if kind != "TiledLinear":
        values, separate = out
        out = values if separate is None else values + separate
    elif options.get("combine_out_splits") is False:
        out = torch.cat(out, dim=-1)
    wanted = whole(x)
    wanted.square().sum().backward()
    out.square().sum().backward()
    gradient = torch.cat([torch.cat([t.weight.grad for t in row], 1) for row in tiles.linears])
    pairs = ((out, wanted), (again.grad, x.grad), (gradient, whole.weight.grad))
    return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("kind", ["TiledLinear", "TiledLinearReturnBias"])
@pytest.mark.parametrize("case", range(len(TILES)))
def test_tiles_equal_a_whole_layer(drop_in_pools, kind, case):
    *shape, options = TILES[case]
    if kind != "TiledLinear" and "combine_out_splits" in options:
        options = {}
    assert max(drop_in_pools(2).run(tiled, kind, shape, options)[0]) < 1e-5


def refused_tiles() -> list[str]:
    make = deepspeed().zero.TiledLinear
    tiles = make(4, 4, in_splits=2)
    return [
        raised(lambda: make(4, 4, in_splits=0)),
        raised(lambda: make(4, 4, out_splits=5)),
        raised(lambda: tiles.copy_params_from(nn.Linear(4, 5))),
        raised(lambda: tiles.copy_params_from(nn.Linear(4, 4, bias=False))),
        raised(lambda: make(4, 4, in_splits=2, input_is_already_split=True)([torch.ones(4)])),
    ]


def test_tiles_refuse(drop_in_pools):
    texts = (
        "RuntimeError: [deepspeed::zero.TiledLinear] in_splits is 0; allowed: 1 to 4",
        "RuntimeError: [deepspeed::zero.TiledLinear] out_splits is 5; allowed: 1 to 4",
        "has shape (5, 4) and the layer a bias; needed: (4, 4), a bias",
        "the layer no bias",
        "1 inputs, but in_splits is 2",
    )
    for text, found in zip(texts, drop_in_pools(2).run(refused_tiles)[0], strict=True):
        assert text in found


def trained_tiles(stage: int) -> float:
    torch.manual_seed(0)
    plain = Net()
    ds = deepspeed()
    with ds.zero.Init(enabled=stage == 3, config_dict_or_path=config(stage)):
        model = Net()
        model.head = ds.zero.TiledLinear(WIDTH, 3, in_splits=2, out_splits=3)
    with ds.zero.GatheredParameters(model.blocks.parameters(), modifier_rank=0):
        model.blocks.load_state_dict(plain.blocks.state_dict())
    model.head.copy_params_from(plain.head)
    whole = copy.deepcopy(plain)
    whole.head = ds.zero.TiledLinear(WIDTH, 3, True, 2, 3, init_linear=plain.head)
    return gap(model, stage, whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_tiles_train(drop_in_pools, stage):
    assert max(drop_in_pools(2).run(trained_tiles, stage)) < 1e-5
