"""How lists of layers are cut in stages."""

import itertools
import random

import pytest
import torch
from torch import nn

from penstock import ConfigError
from penstock.parallel.pipeline_layers import (
    LayerSpec,
    PipelineLayers,
    TiedLayer,
    TiedLayerSpec,
    balanced,
)


def squares(weights, bounds):
    return sum(sum(weights[a:b]) ** 2 for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_of_squares_is_least(seed):
    draw = random.Random(seed)
    size, parts = draw.randint(4, 9), draw.randint(1, 4)
    weights = [draw.choice([0, 1, 2, 5, 9]) for _ in range(size)]
    may_begin = [draw.random() < 0.7 for _ in range(size)]
    begins = [i for i in range(1, size) if may_begin[i]]
    every = [[0, *chosen, size] for chosen in itertools.combinations(begins, parts - 1)]
    found = balanced(weights, may_begin, parts)
    if not every:
        assert found == []
        return
    assert found in every
    assert squares(weights, found) == min(squares(weights, bounds) for bounds in every)


@pytest.mark.parametrize(
    ("size", "parts", "bounds"), [(7, 3, [0, 3, 5, 7]), (8, 4, [0, 2, 4, 6, 8]), (3, 1, [0, 3])]
)
def test_equal_parts_have_the_longer_ones_first(size, parts, bounds):
    assert balanced([1.0] * size, [True] * size, parts) == bounds


def layers():
    tied = [TiedLayerSpec("a", nn.Linear, 4, 4, bias=False) for _ in range(2)]
    return [
        torch.tanh,
        tied[0],
        nn.ReLU(),
        LayerSpec(nn.Linear, 4, out_features=8),
        LayerSpec(nn.Linear, 8, 4),
        TiedLayerSpec("a", nn.Linear, 4, 4, forward_fn=lambda module, x: x @ module.weight),
    ]


def test_layers_have_names_by_place_and_tied_ones_share():
    model = PipelineLayers(layers(), 2)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert names == {
        "1.weight", "3.weight", "3.bias", "4.weight", "4.bias", "5.module.weight"
    }  # fmt: skip
    last = model.forward_funcs[5]
    assert isinstance(last, TiedLayer) and last.module is not model.forward_funcs[1]
    assert last.module.weight is model.forward_funcs[1].weight
    x = torch.ones(2, 4)
    one, two = model.forward_funcs[3], model.forward_funcs[4]
    expected = two(one(torch.relu(model.forward_funcs[1](torch.tanh(x))))) @ last.module.weight
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("method", "parts", "begins"),
    [
        ("parameters", 2, ["4"]),
        ("uniform", 3, ["3", "5"]),
        ("uniform", 4, ["3", "4", "5"]),
        ("type:linear", 2, ["4"]),
        ("TYPE:tanh|relu", 2, ["5"]),
    ],
)
def test_stages_begin_with_layers_that_have_parameters(method, parts, begins):
    model = PipelineLayers(layers(), parts, method)
    assert model.pipeline_settings() == {
        "mesh": {"pipeline": parts},
        "parallel": {"stages": begins},
        "units": {"modules": ["Linear", "TiedLayer"]},
    }
    owners = [model.stage_owner(index) for index in range(6)]
    assert owners == sorted(owners) and set(owners) == set(range(parts))
    with pytest.raises(ConfigError, match="there is no layer 6: the model has 6 layers"):
        model.stage_owner(6)


@pytest.mark.parametrize("parts", [0, -1, 1.0, True, "2"])
def test_numbers_of_stages(parts):
    with pytest.raises(ConfigError, match="num_stages is"):
        PipelineLayers(layers(), parts)


def test_a_layer_without_parameters_may_be_there_twice():
    relu = nn.ReLU()
    PipelineLayers([nn.Linear(2, 2), relu, nn.Linear(2, 2), relu], 2)
    assert repr(LayerSpec(nn.Linear, 2, bias=False)) == "LayerSpec(Linear, 2, bias=False)"
