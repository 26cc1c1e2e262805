"""Inference on an accelerator: greedy text is that of plain torch on the CPU, and training goes on
to the last bit as if there had been no inference."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import test_inference as inference
import test_quantized as quantized
import test_rest_in_files as rest_in_files
import test_row_slices as row_slices
import test_token_caches as token_caches
import torch

import penstock

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


def slices(family: str, place: str, mode: str, path: str) -> dict[str, Any]:
    on_device.schedule(2)
    return row_slices.slices(family, place, mode, path, on_device.device())


@pytest.mark.parametrize(
    ("family", "place", "mode"),
    [
        ("llama", "zero3 alone", "stream"),
        ("gpt2", "zero3", "resident"),
        ("phi3", "disk", "stream"),
        ("mistral", "P2", "auto"),
        ("opt", "T2", "stream"),
    ],
    ids="-".join,
)
def test_slices_of_the_batch(family, place, mode, device_pools, tmp_path):
    world = inference.PLACES[place][0]
    for told in device_pools(world).run(slices, family, place, mode, str(tmp_path), timeout=200):
        assert all(told["same"])
        assert max(told["error"]) < 1e-5


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
)
def test_cached_tokens_move(family, place, tier, device_pools, tmp_path):
    world = token_caches.PLACES[place][0]
    run = device_pools(world).run
    for told in run(caches_tokens, family, place, tier, str(tmp_path), timeout=200):
        assert told["same"]
        assert told["memory"] > 0 and told["plan"] > 0, told


def uses_caches(path: str, tier: str) -> dict[str, bool]:
    on_device.schedule(9)
    return token_caches.stories(path, tier, 1, on_device.device())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_ways_to_use_a_cache(tier, device_pools, tmp_path):
    [told] = device_pools(1).run(uses_caches, str(tmp_path), tier, timeout=300)
    assert [name for name, same in told.items() if not same] == []


def rounds_tokens(path: str, dtype: str) -> Any:
    on_device.schedule(11)
    return token_caches.quantized(path, dtype, "disk", on_device.device())


def test_quantized_tokens(device_pools, tmp_path):
    [(error, plain, coded)] = device_pools(1).run(rounds_tokens, str(tmp_path), "int8")
    assert 0 < error < 0.02 and plain["disk"] > 3.6 * coded["disk"]


def reference_model(dtype: str) -> dict[str, list[int]]:
    """Bytes on the device between the uses of a reference model, above those before it."""
    on_device.schedule(4)
    device = on_device.device()

    def allocated() -> int:
        torch.accelerator.synchronize()
        return int(torch.accelerator.memory_allocated())

    before = allocated()
    model = inference.hf.build("llama").to(device)
    buffers = sum(one.nbytes for one in model.buffers())
    engine = penstock.initialize(
        model,
        {
            "inference": True,
            "strategy": "zero3",
            "offload": {"params": "host"},
            "quantize": {"dtype": dtype},
        },
    )
    between = []
    for _ in range(3):
        between.append(allocated() - before - buffers)
        ids = inference.prompts().to(device)
        with torch.no_grad():
            sum(engine(input_ids=ids).logits.float().mean() for _ in range(2))
        del ids
    engine.close(gather=False)
    return {"between": between}


@pytest.mark.parametrize("dtype", ["none", "int8"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_reference_model_on_the_host_takes_no_device_memory(dtype, world, device_pools):
    for told in device_pools(world).run(reference_model, dtype, timeout=200):
        assert max(told["between"]) <= 4096, told  # torch rounds the buffers up


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
