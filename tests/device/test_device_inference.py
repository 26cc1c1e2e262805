"""Inference on an accelerator: greedy text is that of plain torch on the CPU, and training goes on
to the last bit as if there had been no inference."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import test_inference as inference
import test_quantized as quantized
import test_rest_in_files as rest_in_files
import test_token_caches as token_caches
import torch

pytestmark = pytest.mark.timeout(480)
CASES = [
    ("llama", "zero3", "resident"),
    ("gpt2", "zero3", "stream"),
    ("qwen3", "host", "stream"),
    ("phi3", "disk", "stream"),
    ("opt", "T2", "auto"),
    ("mistral", "S2", "stream"),
    ("llama", "P2", "auto"),
    ("gpt2", "P2D2", "stream"),
    ("opt", "hpz", "resident"),
    ("qwen3", "zero1", "auto"),
]


def generates(family: str, place: str, mode: str, path: str) -> dict[str, Any]:
    on_device.schedule(1)
    return inference.generates(family, place, mode, path, on_device.device())


@pytest.mark.parametrize(("family", "place", "mode"), CASES, ids="-".join)
def test_generates(family, place, mode, device_pools, tmp_path):
    world = inference.PLACES[place][0]
    for told in device_pools(world).run(generates, family, place, mode, str(tmp_path), timeout=200):
        assert told["same"]
        assert told["forwards"][0] == told["forwards"][1]


def runs_from_files(path: str, table: dict[str, Any]) -> dict[str, Any]:
    on_device.schedule(3)
    return rest_in_files.runs(path, table, on_device.device())


@pytest.mark.parametrize("table", ["alone", "zero3", "hpz", "P2"])
def test_runs_from_the_files(table, device_pools, tmp_path):
    world, config = rest_in_files.TABLES[table]
    for told in device_pools(world).run(runs_from_files, str(tmp_path), config, timeout=200):
        assert told["same"] and told["state"] and told["closed"] and told["kept"], told
        assert told["units"] > 0 and told["written"] == 0, told


def runs_quantized(path: str, dtype: str, table: dict[str, Any]) -> dict[str, Any]:
    on_device.schedule(5)
    return quantized.runs(path, dtype, table, on_device.device())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "table",
    [
        "alone",
        "alone on host",
        "alone on the device",
        "zero3",
        "zero3 on host",
        "hpz",
        "kept",
        "P2",
    ],
)
def test_computes_with_what_rests(table, dtype, device_pools, tmp_path):
    world, config = quantized.TABLES[table]
    for told in device_pools(world).run(runs_quantized, str(tmp_path), dtype, config, timeout=200):
        assert told["wrong"] == [] and told["closed"] and told["weights"], told
        assert told["same"] and told["resident"], told


def caches_tokens(family: str, place: str, tier: str, path: str) -> dict[str, Any]:
    on_device.schedule(7)
    return token_caches.generates(family, place, tier, path, on_device.device())


@pytest.mark.parametrize(
    ("family", "place", "tier"),
    [
        ("llama", "alone", "host"),
        ("mistral", "alone", "disk"),
        ("gpt2", "zero3", "disk"),
        ("phi3", "params on disk", "disk"),
        ("opt", "T2", "host"),
        ("llama", "P2", "host"),
        ("qwen3", "hpz", "disk"),
    ],
    ids="-".join,
)
def test_cached_tokens_move(family, place, tier, device_pools, tmp_path):
    world = token_caches.PLACES[place][0]
    run = device_pools(world).run
    for told in run(caches_tokens, family, place, tier, str(tmp_path), timeout=200):
        assert told["same"]
        assert told["memory"] > 0 and told["plan"] > 0, told


def trained(place: str, path: str, mode: str) -> list[torch.Tensor]:
    on_device.schedule(2)
    return inference.trained("llama", place, path, mode, on_device.device())


@pytest.mark.parametrize(
    ("place", "mode"),
    [("zero3", "resident"), ("zero3", "stream"), ("host", "stream"), ("disk", "resident"),
     ("T2", "resident"), ("P2", "stream")],
)  # fmt: skip
def test_training_goes_on(place, mode, device_pools, tmp_path):
    pool = device_pools(inference.PLACES[place][0])
    without = pool.run(trained, place, str(tmp_path), "", timeout=200)
    for ours, plain in zip(
        pool.run(trained, place, str(tmp_path), mode, timeout=200), without, strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
