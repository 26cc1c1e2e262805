"""What initialize() says of the machine's devices and cores."""

from __future__ import annotations

import os
import types
import warnings

import pytest
import torch

from penstock.front.training_device import warn_of_one_thread

SET = {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("device", "optimizer", "cores", "changed", "warns"),
    [
        ("cuda", "host", 16, {}, True),
        ("cuda", "disk", 16, {}, True),
        ("cuda", "none", 16, {}, False),
        ("cpu", "host", 16, {}, False),
        ("cuda", "host", 4, {}, False),  # two for each rank
        ("cuda", "host", 16, {"OMP_NUM_THREADS": "8"}, False),
        ("cuda", "host", 16, {"LOCAL_RANK": "1"}, False),
        ("cuda", "host", 16, {"LOCAL_WORLD_SIZE": ""}, True),
    ],
)
def test_one_thread_for_the_optimizer_on_the_host(  # noqa: PLR0913, PLR0917 - the table's columns
    device, optimizer, cores, changed, warns, monkeypatch
):
    for name, value in (SET | changed).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        config = types.SimpleNamespace(offload=types.SimpleNamespace(optimizer=optimizer))
        warn_of_one_thread(torch.nn.Linear(1, 1), torch.device(device), config)
    assert ["OMP_NUM_THREADS is 1" in str(one.message) for one in seen] == [True] * warns
