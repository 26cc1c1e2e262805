"""Engines that are made and closed leave no memory, thread, file or object behind."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib

import pytest
import torch
from torch import nn

# Engines that are made before the first measurement, and after it.
WARM, MORE, MORE_FULL = 20, 20, 180
LARGEST_GROWTH = 0.01  # of the resident memory
# A closed engine that the user keeps holds its objects and last events; with peers also buffers.
KEPT_KIB = {1: 64, 2: 256}


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def resident_kib():
    """Anonymous memory of this process, without what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1])
    raise AssertionError("no smaps_rollup")


def allocated_kib():
    """Memory that was allocated with malloc() and is not freed."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) // 1024


def open_things():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def train_and_close(config):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = penstock.initialize(model, config, optimizer={"type": "AdamW", "lr": 0.1})
    dtype = model[0].weight.dtype
    engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().sum())
    engine.step()
    engine.close()
    return engine


CONFIGS = {
    "zero3": {"strategy": "zero3"},
    "bf16 on the host": {
        "strategy": "zero1",
        "precision": "bf16",
        "offload": {"optimizer": "host"},
    },
    "disk": {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "disk", "params": "disk"},
    },
    "gloo": {"strategy": "zero3", "comm": {"backend": "gloo"}},
}


def many(config, more):
    """Returns resident KiB, and threads and files, before and after `more` engines."""
    for _ in range(WARM):
        train_and_close(config)
    before = resident_kib(), open_things()
    for _ in range(more):
        train_and_close(config)
    return before, (resident_kib(), open_things())


@pytest.mark.parametrize(("name", "ranks"), [("zero3", 1), *((name, 2) for name in CONFIGS)])
def test_closed_engines_leave_nothing(name, ranks, request, pools, tmp_path):
    config = dict(CONFIGS[name])
    if name == "disk":
        config["offload"] = {**config["offload"], "path": str(tmp_path)}
    more = MORE_FULL if request.config.getoption("full") else MORE
    for (kib, things), (kib_after, things_after) in pools(ranks).run(many, config, more):
        assert kib_after < kib * (1 + LARGEST_GROWTH), f"{kib} and then {kib_after} KiB"
        assert things_after <= things, f"threads, files: {things} and then {things_after}"
    assert not list(tmp_path.iterdir())


def kept(config, count):
    """Returns KiB per engine that is closed and kept, and threads and files before and after."""
    for _ in range(3):
        train_and_close(config)
    before, things = allocated_kib(), open_things()
    engines = [train_and_close(config) for _ in range(count)]
    used = (allocated_kib() - before) / count
    after = open_things()
    del engines
    return used, things, after


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_engine_that_is_kept_is_small(ranks, pools):
    for used, before, after in pools(ranks).run(kept, CONFIGS["zero3"], 10):
        assert used < KEPT_KIB[ranks], f"{used} KiB for an engine"
        assert after <= before, f"threads, files: {before} and then {after}"
