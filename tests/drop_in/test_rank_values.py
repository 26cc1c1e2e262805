"""DeepSpeed's objects that put values of several ranks together: PartitionedTensor, and
GatherReplacedLayerParams over tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipe_models import deepspeed
from test_tensor_ranks import CASES, built, config_of

pytestmark = pytest.mark.timeout(480)


def _parts(numel: int) -> dict[str, Any]:
    made = deepspeed().runtime.utils.PartitionedTensor(torch.arange(numel).view(-1, 1), None)
    again = type(made).from_meta(made.to_meta(), made.data(), None)
    return {
        "local": made.data().tolist(),
        "meta": made.to_meta().tolist(),
        "full": made.full().flatten().tolist(),
        "shape": list(again.full().shape),
        "again": again.full().flatten().tolist(),
    }


@pytest.mark.parametrize("numel", [1, 4, 5])
def test_partitioned_tensor(drop_in_pools, numel):
    found = drop_in_pools(2).run(_parts, numel)
    assert [*found[0]["local"], *found[1]["local"]] == list(range(numel))
    for rank, one in enumerate(found):
        assert one["full"] == one["again"] == list(range(numel))
        assert one["shape"] == [numel, 1]
        bound = (numel + 1) // 2
        assert one["meta"] == [2, numel, 1, 2, rank, 0, bound, numel]


def _gathered(stage: int, enabled: bool) -> bool:
    module, section = CASES["specs"]
    model, like = built(module), built(module)
    engine = deepspeed().initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config_of(stage, 2, **section),
    )[0]
    gather = deepspeed().module_inject.layers.GatherReplacedLayerParams
    names = [name for name, _ in like.named_parameters()]
    same = []
    for name in names:
        param = model.get_parameter(name)
        if stage == 3 and not enabled:
            continue
        with gather([param], model, enabled=enabled):
            whole = like.get_parameter(name)
            same.append(param.shape == whole.shape and torch.equal(param.data, whole.data))
    engine.destroy()
    return all(same)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replaced_layers_are_whole(drop_in_pools, stage):
    assert drop_in_pools(2).run(_gathered, stage, True) == [True, True]


def test_nothing_is_gathered_when_it_is_off(drop_in_pools):
    assert drop_in_pools(2).run(_gathered, 1, False) == [False, False]
