"""Engines made, trained, hurt and ended, one after the other: what they were is right, and nothing
of them is left. The lives are drawn in tests/parity/lives.py."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import pathlib
import re

import life_faults
import lives
import psutil
import pytest
import torch
import torch.distributed as dist

# Lives by world size, in rounds of the same lives: whatever torch keeps of a kind of work that it
# does for the first time is there after the first two (the second still grew by 3 MB, seldom).
DAILY, FULL = {1: 60, 2: 18}, {1: 300, 2: 300}
ROUNDS = 3
KEEP = 6  # lives
PATIENCE_S = 1200


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


def tidy_allocator():
    """One arena, and a threshold that stays: what lies between live blocks goes back to the system
    then, and memory that stays resident is memory that something holds."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_ARENA_MAX, 1) and libc.mallopt(M_MMAP_THRESHOLD, 128 << 10)


def resident():
    """Bytes of this process in memory, without pages of files: code that runs for the first time
    comes into memory."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB", status, re.MULTILINE)
    return sum(int(kib) << 10 for kib in found)


def footprint(folder):
    """What this process holds: memory, threads, files, and Python objects of torch and ours."""
    for _ in range(2):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    objects = gc.get_objects()  # but for those that are frozen
    storages = {t.untyped_storage()._cdata for t in objects if type(t) is torch.Tensor}
    shared = [n for n in os.listdir("/dev/shm") if n.startswith(f"torch_{os.getpid()}_")]
    return {
        "bytes": resident(),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "shared memory": len(shared),
        "swap files": len(list(pathlib.Path(folder).iterdir())),
        "tensors": sum(isinstance(o, torch.Tensor) for o in objects),
        "storages": len(storages),
        "engines": sum(type(o).__name__ == "Engine" for o in objects),
        "objects": len(objects) + gc.get_freeze_count(),
    }


def go_round(count, world, folder, first=0):
    """Lives one after the other; footprints after each round."""
    tidy_allocator()
    torch.compile(torch.nn.Linear(1, 1))  # imports what some lives need
    gc.collect()
    gc.freeze()  # what torch is made of: collections are quick then
    looks = []
    kept = collections.deque()
    lap = count // ROUNDS
    for index in range(count):
        kept.append(lives.live(first + index % lap, world, folder))
        if len(kept) > KEEP:
            kept.popleft().check()
        if (index + 1) % lap == 0:
            while kept:
                kept.popleft().check()
            looks.append(footprint(folder))
        if world > 1:
            dist.barrier()
    gc.unfreeze()
    return looks


def check(looks):
    before, after = looks[-2:]
    print(before, after, sep="\n")
    for name, value in before.items():
        assert after[name] <= 1.01 * value, f"{name}: {value} before, {after[name]} after"


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_left_of_lives(world, pools, request, tmp_path):
    count = (FULL if request.config.getoption("--full") else DAILY)[world]
    outcomes = pools(world).run(go_round, count, world, str(tmp_path), timeout=PATIENCE_S)
    for looks in outcomes:
        check(looks)


def begin_and_end(how):
    """Threads and descriptors after the second and the last of some engines that end alike."""
    import penstock  # noqa: PLC0415

    used = []
    for _ in range(4):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        offload = {"optimizer": "disk", "path": "/nowhere/at/all"} if how == "refused" else {}
        if how == "set-up raises":
            optimizer.register_load_state_dict_pre_hook = life_faults.Blow()
        try:
            penstock.initialize(model, {"offload": offload}, optimizer=optimizer)
            assert how == "collected"
        except penstock.ConfigError:
            assert how == "refused"
        except life_faults.Planned:
            assert how == "set-up raises"
        if how != "collected":
            assert bool(model.weight.isfinite().all())
            model(torch.ones(2, 64))
        del model, optimizer
        gc.collect()
        dist.barrier()
        used.append((psutil.Process().num_threads(), psutil.Process().num_fds()))
    return used[1], used[-1]


@pytest.mark.parametrize("how", ["refused", "set-up raises", "collected"])
def test_no_connection_is_left_of_an_engine_that_was_not_closed(how, pools):
    for before, after in pools(2).run(begin_and_end, how):
        assert before == after, "threads, descriptors"
