"""The batch sizes of the section "elasticity", and its errors."""

import copy

import pytest

from penstock import ConfigError
from penstock.launch.elastic_batches import (
    ElasticityConfigError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    ensure_immutable_elastic_config,
)

VERSION = "0.19.8+penstock"
SECTION = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}


def config(**changed):
    section = {**copy.deepcopy(SECTION), **changed}
    return {"elasticity": {key: one for key, one in section.items() if one is not ...}}


def test_the_batch_size_fits_the_most_numbers_of_devices():
    batch, counts = compute_elastic_config(config(), VERSION)
    assert (batch, len(counts)) == (9792, 23)
    for count in counts:
        assert any(batch % (count * micro) == 0 for micro in SECTION["micro_batch_sizes"])
    assert compute_elastic_config(config(), VERSION, world_size=64) == (batch, counts, 17)
    assert compute_elastic_config(config(), VERSION, return_microbatch=True)[2] in (8, 12, 16, 17)


@pytest.mark.parametrize("largest", [24, 100, 1000, 4096])
def test_the_batch_size_is_at_most_the_largest(largest):
    given = config(max_train_batch_size=largest, micro_batch_sizes=[8, 10, 12], min_gpus=1)
    batch, counts = compute_elastic_config(given, VERSION)
    assert batch <= largest and counts == sorted(set(counts)) and counts[0] >= 1


def test_smaller_batches_can_be_preferred():
    changed = {"max_train_batch_size": 16, "micro_batch_sizes": [2, 4], "min_gpus": 1}
    large = compute_elastic_config(config(**changed, max_gpus=1), VERSION)[0]
    small = compute_elastic_config(
        config(**changed, max_gpus=1, prefer_larger_batch=False), VERSION
    )
    assert small[0] < large


def test_whole_nodes_with_model_ranks(monkeypatch):
    given = config(model_parallel_size=4, num_gpus_per_node=8, version=0.2)
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, counts = compute_elastic_config(given, VERSION)
    assert batch <= 10000 and all(one % 2 == 0 for one in counts)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ElasticityConfigError, match="needs the number of devices"):
        compute_elastic_config(given, VERSION)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enabled": False}, "missing or not enabled"),
        ({"max_train_batch_size": ...}, "max_train_batch_size"),
        ({"micro_batch_sizes": ...}, "micro_batch_sizes"),
        ({"micro_batch_sizes": 5}, "positive whole numbers"),
        ({"micro_batch_sizes": [2, 0.5]}, "positive whole numbers"),
        ({"micro_batch_sizes": [1, -1]}, "positive whole numbers"),
        ({"min_gpus": -1}, "min_gpus"),
        ({"max_gpus": -1}, "max_gpus"),
        ({"version": "0.3"}, "the newest is 0.2"),
        ({"model_parallel_size": 4, "num_gpus_per_node": 8}, 'needs "version" 0.2'),
        ({"max_train_batch_size": 10}, "above the largest batch size"),
    ],
)
def test_refused(changed, message):
    with pytest.raises(ElasticityConfigError, match=message):
        compute_elastic_config(config(**changed), VERSION)


def test_refused_numbers_of_devices_and_versions():
    with pytest.raises(ElasticityIncompatibleWorldSize, match="128 devices do not fit .* 9792"):
        compute_elastic_config(config(), VERSION, world_size=128)
    with pytest.raises(ElasticityConfigError, match=r"DeepSpeed 0\.2 has no elasticity"):
        compute_elastic_config(config(), "0.2")
    given = config(model_parallel_size=16, num_gpus_per_node=8, version=0.2)
    with pytest.raises(ConfigError, match="not divisible"):
        compute_elastic_config(given, VERSION, world_size=16)


def test_a_planned_section_must_stay(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", '{"max_train_batch_size": 27}')
    with pytest.raises(ElasticityConfigError, match="was 27 when the run was scheduled"):
        ensure_immutable_elastic_config(SECTION)
