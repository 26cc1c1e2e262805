"""Cases of test_simulated.py that run on two ranks, each with the default group gloo and simccl."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sim
import torch
import torch.distributed as dist
from device_model import Training, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BACKENDS = "cpu:gloo,sim:simccl"


def meet(port: int) -> None:
    """Replaces the pool's default group, which knows no simulated device, the first time. Each rank
    has a device of its own, as NCCL demands."""
    torch.accelerator.set_device_index(dist.get_rank())
    if dist.get_backend_config() == BACKENDS:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.PrefixStore("sim", dist.TCPStore("127.0.0.1", port, is_master=False))
    timeout = timedelta(seconds=30)
    dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world, timeout=timeout)


def on(device: str, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def gathered(device: str) -> list[torch.Tensor]:
    """Every collective once, on tensors that differ by rank; all results."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    results = []

    def keep(tensor: torch.Tensor, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        results.append(tensor)

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        x = on(device, 1, 2.5) * (rank + 1)
        keep(x, dist.all_reduce(x, operation, async_op=True))
    x = on(device, 1 + rank / 128, 3, dtype=torch.bfloat16)
    keep(x, dist.all_reduce(x, async_op=True))
    x, y = on(device, rank, 7), torch.empty(4, device=device)
    keep(y, dist.all_gather_into_tensor(y, x, async_op=True))
    x, y = torch.arange(6.0, device=device) * (rank + 1), torch.empty(3, device=device)
    keep(y, dist.reduce_scatter_tensor(y, x, async_op=True))
    x = on(device, rank, 9)
    keep(x, dist.broadcast(x, 1, async_op=True))
    x = on(device, rank + 1)
    work = dist.reduce(x, 1, async_op=True)
    keep(x if rank == 1 else torch.zeros(1), work)
    parts = [torch.empty(2, device=device) for _ in range(2)]
    keep(parts[1], dist.all_gather(parts, on(device, rank, 5), async_op=True))
    y = torch.empty(4, device=device)
    keep(y, dist.all_to_all_single(y, on(device, 1, 2, 3, 4) * (rank + 1), async_op=True))
    y = torch.empty(1, device=device)
    keep(y, dist.scatter(y, [on(device, 3), on(device, 4)] if rank == 0 else None, async_op=True))
    to = [torch.empty(1, device=device) for _ in range(2)] if rank == 0 else None
    work = dist.gather(on(device, rank + 5), to, async_op=True)
    keep(to[1] if to else torch.zeros(1), work)
    y = torch.empty(2, device=device)
    swap = [dist.P2POp(dist.isend, on(device, rank, 1), other), dist.P2POp(dist.irecv, y, other)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    results.append(y)
    return [result.cpu() for result in results]


def collectives(seed: int) -> None:
    sim.set_seed(seed)
    sim.set_delays_us(0, 200)
    expected = gathered("cpu")
    for _ in range(3):
        got = gathered("sim")
        assert all(map(torch.equal, got, expected)), (got, expected)
    sim.set_delays_us(0, 0)
    dist.barrier()


def issue_returns_before_it_is_done() -> None:
    """Nothing has moved when the call returns, wait() does not block the host, and what is read
    after wait() is the sum."""
    rank = dist.get_rank()
    x = on("sim", 1)
    dist.all_reduce(x)  # connects
    torch.accelerator.synchronize()
    dist.barrier()
    for late in (0, 1):
        x = torch.ones(1, device="sim")
        torch.empty_like(x)  # leaves memory for y in the cache
        torch.accelerator.synchronize()
        sim.reset_counters()
        if rank == late:
            time.sleep(1.0)  # the other rank's collective cannot be done before
        work = dist.all_reduce(x, async_op=True)
        done = work.is_completed()
        work.wait()
        y = x + 1
        waits = sim.counters().host_waits_by_name
        assert not done or rank == late
        assert waits == {} and y.item() == 3, (waits, y)
    counted = sim.counters()
    assert counted.collectives == sim.Tally(1, 4)
    assert counted.collectives_by_name == {"all_reduce": sim.Tally(1, 4)}


def reads_without_waiting() -> int:
    """How often the result of a collective that nobody waited for was the old one."""
    wrong = 0
    sim.set_delays_us(0, 100)
    for seed in range(20):
        sim.set_seed(seed)
        x = torch.ones(1, device="sim")
        work = dist.all_reduce(x, async_op=True)
        y = x * 1
        work.wait()
        wrong += y.item() != 2
    sim.set_delays_us(0, 0)
    return wrong


def groups() -> None:
    """New groups, a mesh, coalesced collectives, objects, and an abort."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1], backend=BACKENDS)
    alone = dist.new_group([rank], backend=BACKENDS, use_local_synchronization=True)
    x = on("sim", rank + 1)
    dist.all_reduce(x, group=pair)
    dist.all_reduce(x, group=alone)
    assert x.item() == 3
    mesh = init_device_mesh("sim", (2,))
    dist.all_reduce(x, group=mesh.get_group())
    assert x.item() == 6
    many = [on("sim", i, rank) for i in range(3)]
    with dist._coalescing_manager(device=torch.device("sim", rank), async_ops=True) as manager:
        for one in many:
            dist.all_reduce(one)
    manager.wait()
    assert [one.tolist() for one in many] == [[0, 1], [2, 1], [4, 1]]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.wait()[0].item() == 12
    dist.destroy_process_group(alone)
    queued = [dist.all_reduce(x, group=pair, async_op=True) for _ in range(5)]
    dist.destroy_process_group(pair)  # with its collectives in the queue
    for work in queued:
        work.wait()
    assert x.item() == 12 * 2**5


def synchronous() -> None:
    """Without async_op a collective runs on the caller's stream, there is no work, and the memory
    is free in the order of that stream."""
    side = torch.Stream("sim")
    sim.set_delays_us(0, 100)
    for seed in range(5):
        sim.set_seed(seed)
        with side:
            x = torch.ones(1 << 12, device="sim")
            assert dist.all_reduce(x) is None
            y = x + 1
            del x
            torch.full((1 << 12,), 7.0, device="sim")  # in the memory of x
            assert y.sum().item() == 3 << 12
    sim.set_delays_us(0, 0)


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("sim"))


def connects_lazily() -> None:
    """The first collective waits on the host for the other rank; the next one does not."""
    group = dist.new_group([0, 1], backend=BACKENDS)
    x = on("sim", 1)
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=60)
    call = (store.add("lazily", 1) - 1) // 2  # equal on both ranks
    dist.barrier()
    coming, issued = f"lazily {call} coming", f"lazily {call} issued"
    if dist.get_rank() == 1:
        time.sleep(0.7)
        store.set(coming, "1")
    dist.all_reduce(x, group=group)
    assert store.check([coming]), "the first collective did not wait for the other rank"
    if dist.get_rank() == 1:
        store.wait([issued], limit)  # ends only if the other rank's collective did not wait
    dist.all_reduce(x, group=group)
    if dist.get_rank() == 0:
        store.set(issued, "1")
    torch.accelerator.synchronize()
    dist.destroy_process_group(group)


def refuses_two_ranks_on_a_device() -> None:
    """As NCCL does."""
    group = dist.new_group([0, 1], backend=BACKENDS)
    torch.accelerator.set_device_index(3)
    try:
        dist.all_reduce(torch.ones(1, device="sim"), group=group)
    except dist.DistBackendError as error:
        assert "ranks 0 and 1 are on the same device 3" in str(error)
    else:
        raise AssertionError("two ranks on one device")
    finally:
        torch.accelerator.set_device_index(dist.get_rank())
        _backend(group).abort()


def finds_another_order() -> list[bool]:
    """Two ranks launch on two communicators. Whether that ended, if they launch in one order, and
    if rank 1 launches in the other one."""
    ended = []
    for swapped in (False, True):
        groups = [dist.new_group([0, 1], backend=BACKENDS) for _ in range(2)]
        x = on("sim", 1)
        for group in groups:
            dist.all_reduce(x, group=group)
        torch.accelerator.synchronize()
        order = groups[::-1] if swapped and dist.get_rank() == 1 else groups
        works = [dist.all_reduce(x, group=group, async_op=True) for group in order]
        deadline = time.monotonic() + (1 if swapped else 60)
        while time.monotonic() < deadline and not all(work.is_completed() for work in works):
            time.sleep(0.01)
        ended.append(all(work.is_completed() for work in works))
        dist.barrier()
        # Together: an abort waits for the device's collectives of other groups.
        aborts = [threading.Thread(target=_backend(group).abort) for group in groups]
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join()
        torch.accelerator.synchronize()
    return ended


def wrapped_as_on_the_cpu(wrap: Callable[[str], Callable[[nn.Module], nn.Module]]) -> None:
    rank = dist.get_rank()
    expected = train("cpu", Training(wrap=wrap("cpu"), rank=rank))
    for seed in range(2):
        sim.set_seed(seed)
        sim.set_delays_us(0, 100)
        assert train("sim", Training(wrap=wrap("sim"), rank=rank)) == expected
        sim.set_delays_us(0, 0)


def ddp(_: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, bucket_cap_mb=0.05)


def fsdp2(device: str) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(device, (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return shard


def trained_with_ddp() -> None:
    wrapped_as_on_the_cpu(ddp)


def trained_with_fsdp2() -> None:
    wrapped_as_on_the_cpu(fsdp2)
