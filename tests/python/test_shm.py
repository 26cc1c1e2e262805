"""Ranks of one host over shared memory: the same results, what else there may be, and kills."""

from __future__ import annotations

import copy
import datetime
import pathlib
import platform
import resource
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
SIZES = (1, 7, 5000, 100_003)
NUM_KILLS, NUM_KILLS_FULL = 6, 50


# ---- the engine's own exchanges


def train(backend, steps=3):
    """Losses of an engine, what it says of its ranks, and the warnings."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    config = {"strategy": "zero3", "optimizer": {"type": "AdamW"}, "clip": 1.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = penstock.initialize(model, config, comm={"backend": backend, "timeout_s": 60})
    losses = []
    for step in range(steps):
        batch = torch.full((4, 300), 0.01 * (step + 1) * (dist.get_rank() + 1))
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    text = engine.explain()
    engine.close()
    said = [str(one.message) for one in caught if "shared memory" in str(one.message)
            or "share memory" in str(one.message)]  # fmt: skip
    line = next(one for one in text.splitlines() if one.startswith("ranks exchange through"))
    return losses, line, said


@pytest.mark.parametrize("world", [2, 4])
def test_auto_is_shared_memory_on_one_host(world, pools):
    results = {name: pools(world).run(train, name) for name in ("auto", "shm", "gloo")}
    for rank in range(world):
        assert results["auto"][rank][1:] == ("ranks exchange through shm", [])
        assert results["shm"][rank][1:] == ("ranks exchange through shm", [])
        assert results["gloo"][rank][1:] == ("ranks exchange through gloo", [])
        assert results["auto"][rank][0] == results["gloo"][rank][0] == results["shm"][rank][0]


def train_without_room(backend):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # of files in memory, too
    try:
        return train(backend)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("backend", ["auto", "shm"])
def test_without_memory_all_ranks_warn_and_use_gloo(backend, pools):
    for _, line, said in pools(2).run(train_without_room, backend):
        assert line == "ranks exchange through gloo"
        assert len(said) == 1
        assert "exchange over gloo: rank 0: cannot allocate " in said[0], said
        assert "of shared memory: File too large" in said[0], said


# A filter of system calls as containers have it: no process reads another's memory.
NO_READS = """
import ctypes, struct, sys
assert sys.platform == "linux"
CALL, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 310, 38, 22, 2
code = b"".join(struct.pack("HBBI", *one) for one in [
    (0x20, 0, 0, 0), (0x15, 0, 1, CALL), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
assert libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(program), 0, 0) == 0
"""


def test_where_no_process_may_read_another(tmp_path):
    """Everything goes through the shared memory itself then, large and small."""
    if platform.machine() != "x86_64":
        pytest.skip("the filter is written for x86-64")
    script = tmp_path / "script.py"
    body = """
import torch, torch.distributed as dist, penstock
dist.init_process_group("gloo")
import test_shm
losses, line, said = test_shm.train("auto")
assert line == "ranks exchange through shm, copied twice: no process may read another's memory here"
assert losses == test_shm.train("gloo")[0] and not said
test_shm.compare_collectives()
dist.destroy_process_group()
"""
    here = pathlib.Path(__file__).parent
    path = f"import sys; sys.path.insert(0, {str(here)!r})\n"
    script.write_text(NO_READS + path + textwrap.dedent(body), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


# ---- torch's own, over the back end "penstock"


def values(dtype, size, seed):
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randint(-8, 9, (size,), generator=random).to(dtype)  # sums are exact
    return torch.randint(0, 2, (size,), generator=random).to(dtype)


def collectives(group, dtype, size):
    """What each collective gives, by name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = values(dtype, size, rank)
    out = {}

    def keep(name, *tensors):
        out[name] = [tensor.clone() for tensor in tensors]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        if dtype is torch.bool and op is dist.ReduceOp.PRODUCT:
            continue
        reduced = own.clone()
        dist.all_reduce(reduced, op, group=group)
        keep(f"all_reduce {op}", reduced)
    sent = own.clone()
    dist.broadcast(sent, world - 1, group=group)
    keep("broadcast", sent)
    full = torch.empty(world * size, dtype=dtype)
    dist.all_gather_into_tensor(full, own, group=group)
    keep("all_gather_into_tensor", full)
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own, group=group)
    keep("all_gather", *parts)
    shard = torch.empty_like(own)
    wide = values(dtype, world * size, rank)
    dist.reduce_scatter_tensor(shard, wide, group=group)
    keep("reduce_scatter_tensor", shard)
    dist.reduce_scatter(shard, list(wide.chunk(world)), group=group)
    keep("reduce_scatter", shard)
    back = torch.empty_like(wide)
    dist.all_to_all_single(back, wide, group=group)
    keep("all_to_all_single", back)
    reduced = own.clone()
    dist.reduce(reduced, 0, group=group)
    if rank == 0:
        keep("reduce", reduced)
    dist.gather(own, parts if rank == 0 else None, 0, group=group)
    keep("gather", *parts)
    dist.scatter(shard, list(wide.chunk(world)) if rank == 0 else None, 0, group=group)
    keep("scatter", shard)
    messages = [torch.empty_like(own) for _ in range(4)]
    to, source = (rank + 1) % world, (rank - 1) % world
    works = [dist.isend((own.double() + i).to(dtype), to, group=group) for i in range(4)]
    works += [dist.irecv(message, source, group=group) for message in messages]
    for work in works:
        work.wait()
    keep("messages in order", *messages)
    dist.barrier(group=group)
    return out


def compare_collectives():
    groups = [dist.new_group(backend=name) for name in ("penstock", "gloo")]
    for dtype in DTYPES:
        for size in SIZES if dtype in FLOATS else (5000,):
            ours, theirs = (collectives(group, dtype, size) for group in groups)
            for name in theirs:
                for mine, other in zip(ours[name], theirs[name], strict=True):
                    assert torch.equal(mine, other), (name, dtype, size)
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_are_those_of_gloo(world, pools):
    pools(world).run(compare_collectives)


def what_gloo_has_not():
    """Averages, rows by rank, whoever sends first, and views that lie apart."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="penstock", timeout=datetime.timedelta(seconds=30))
    mean = torch.tensor([1.0, 3.0]) * (rank + 1)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    assert mean.tolist() == [(world + 1) / 2, 3 * (world + 1) / 2]
    apart = torch.full((40, 50), float(rank + 1)).t()
    work = dist.all_reduce(apart, group=group, async_op=True)
    work.wait()
    assert torch.equal(apart, torch.full((50, 40), world * (world + 1) / 2))
    rows = torch.full((world + 1, 3), float(rank))
    sizes = [1] * world
    sizes[0] = 2
    got = torch.empty(2 * world if rank == 0 else world, 3)
    dist.all_to_all_single(got, rows, [2 if rank == 0 else 1] * world, sizes, group=group)
    assert got[-1, 0] == world - 1
    if rank == 0:
        value = torch.zeros(1000)
        seen = {dist.recv(value, group=group) for _ in range(world - 1)}
        assert seen == set(range(1, world))
    else:
        dist.send(torch.full((1000,), float(rank)), 0, group=group)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": i} for i in range(world)]
    dist.destroy_process_group(group)


def test_what_gloo_has_not(pools):
    pools(3).run(what_gloo_has_not)


def losses_over(name, kind, steps=4):
    group = dist.new_group(backend=name)
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64))
    if kind == "DDP":
        trained = DistributedDataParallel(model, process_group=group)
    else:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        batch = values(torch.float32, 8 * 64, 10 * step + dist.get_rank()).view(8, 64)
        loss = trained(batch).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    del trained, model
    dist.destroy_process_group(group)
    return copy.copy(losses)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_torch_trains_over_it_to_the_same_losses(kind, pools):
    ours, theirs = (pools(2).run(losses_over, name, kind) for name in ("penstock", "gloo"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
        assert mine[-1] < mine[0]


# ---- kills


def test_a_kill_frees_the_others_and_leaves_nothing(request):
    rounds = NUM_KILLS_FULL if request.config.getoption("full") else NUM_KILLS
    script = pathlib.Path(__file__).parent / "shm_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), str(rounds), "0"],
        capture_output=True,
        text=True,
        timeout=60 + 30 * rounds,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
