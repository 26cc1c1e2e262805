"""Engines made, trained, hurt and ended, one after the other: what they were is right, and nothing
of them is left. The lives are drawn in tests/parity/lives.py."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import pathlib

import lives
import psutil
import pytest
import torch
import torch.distributed as dist

DAILY, FULL = 40, 200
WARM = 20  # lives before the first look
KEEP = 6  # lives
PATIENCE_S = 1200


def footprint(folder):
    """What this process holds: memory, threads, files, and Python objects of torch and ours."""
    for _ in range(2):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    objects = gc.get_objects()
    storages = {t.untyped_storage()._cdata for t in objects if type(t) is torch.Tensor}
    shared = [n for n in os.listdir("/dev/shm") if n.startswith(("torch_", "penstock"))]
    return {
        "resident bytes": process.memory_info().rss,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "shared memory": len(shared),
        "swap files": len(list(pathlib.Path(folder).iterdir())),
        "tensors": sum(isinstance(o, torch.Tensor) for o in objects),
        "storages": len(storages),
        "engines": sum(type(o).__name__ == "Engine" for o in objects),
        "objects": len(objects),
    }


def go_round(count, world, folder, first=0):
    """Lives one after the other; footprints after the warm-up and at the end."""
    looks = []
    kept = collections.deque()
    for seed in range(first, first + count):
        kept.append(lives.live(seed, world, folder))
        if len(kept) > KEEP:
            kept.popleft().check()
        if seed - first + 1 in (WARM, count):
            while kept:
                kept.popleft().check()
            looks.append(footprint(folder))
        if world > 1:
            dist.barrier()
    return looks


def check(looks):
    before, after = looks
    print(before, after, sep="\n")
    for name, value in before.items():
        assert after[name] <= 1.01 * value, f"{name}: {value} before, {after[name]} after"


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_left_of_lives(world, pools, request, tmp_path):
    count = FULL if request.config.getoption("--full") else DAILY
    outcomes = pools(world).run(go_round, count, world, str(tmp_path), timeout=PATIENCE_S)
    for looks in outcomes:
        check(looks)


def begin_and_end(how):
    """Threads and descriptors after the third and the last of some engines that end alike."""
    import penstock  # noqa: PLC0415

    used = []
    for _ in range(6):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        offload = {"optimizer": "disk", "path": "/nowhere/at/all"} if how == "refused" else {}
        if how == "set-up raises":
            optimizer.register_load_state_dict_pre_hook = lives.Blow()
        try:
            penstock.initialize(model, {"offload": offload}, optimizer=optimizer)
            assert how == "collected"
        except penstock.ConfigError:
            assert how == "refused"
        except lives.Planned:
            assert how == "set-up raises"
        if how != "collected":
            assert bool(model.weight.isfinite().all())
            model(torch.ones(2, 64))
        del model, optimizer
        gc.collect()
        dist.barrier()
        used.append((psutil.Process().num_threads(), psutil.Process().num_fds()))
    return used[2], used[-1]


@pytest.mark.parametrize("how", ["refused", "set-up raises", "collected"])
def test_no_connection_is_left_of_an_engine_that_was_not_closed(how, pools):
    for before, after in pools(2).run(begin_and_end, how):
        assert before == after, "threads, descriptors"
