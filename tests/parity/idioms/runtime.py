"""Threads, processes, data loaders, collection of garbage: what runs beside the engine."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from idioms import nets
from idioms.table import Group, either, refused

rows = Group("Beside the engine")
ONE = (1,)
FP32 = ("fp32",)
SHORT = {"timeout_s": 5}  # where ranks wait for one that does not come


@rows("forward and backward in another thread")
def thread(t: Any) -> None:
    t.start()
    with ThreadPoolExecutor(1) as pool:
        for step in t.steps(3):
            pool.submit(lambda step=step: t.engine.backward(t.loss(step))).result()
            t.engine.step()


@rows("the whole loop in another thread")
def whole_in_thread(t: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(t.start).result()
        pool.submit(t.train, 3).result()


@rows("forward in one thread, backward in another")
def thread_by_thread(t: Any) -> None:
    t.start()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for step in t.steps(3):
            loss = first.submit(t.loss, step).result()
            second.submit(t.engine.backward, loss).result()
            t.engine.step()


@rows("a new thread for each step")
def thread_each(t: Any) -> None:
    t.start()
    for step in range(3):
        worker = threading.Thread(target=t.train, args=(1, step))
        worker.start()
        worker.join()


@rows("a thread that works on other tensors meanwhile")
def beside(t: Any) -> dict[str, Any]:
    t.start()

    def other() -> torch.Tensor:
        x = torch.ones(8, requires_grad=True)
        for _ in range(50):
            (x * 2).sum().backward()
        return x.grad.sum()

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(other)
        t.train(3)
        return {"sum": made.result()}


@rows("`DataLoader` with a worker process", accumulate=ONE)
def loader(t: Any) -> None:
    t.start()
    x, y = zip(*(t.batch(step) for step in range(3)), strict=True)
    data = TensorDataset(torch.stack(x), torch.stack(y))
    for a, b in DataLoader(data, batch_size=None, num_workers=1):
        loss = torch.nn.functional.mse_loss(t.engine(a).float(), b)
        t.engine.backward(t.note(loss))
        t.engine.step()


@rows("`DataLoader` with workers that stay, and an iterator that is left early", accumulate=ONE)
def loader_left(t: Any) -> None:
    t.start()
    data = TensorDataset(torch.stack([t.batch(step)[0] for step in range(4)]))
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for index, (x,) in enumerate(loader):
            t.engine.backward(t.note(t.engine(x).float().pow(2).mean()))
            t.engine.step()
            if index == 1:
                break
    del loader
    gc.collect()


@rows("`os.fork` beside the engine, whose child ends at once", accumulate=ONE)
def fork(t: Any) -> None:
    t.start()
    t.train(1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    t.train(2, start=1)


@rows("a subprocess beside the engine", accumulate=ONE)
def sub_process(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    done = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, check=True)
    t.train(1, start=1)
    return {"printed": int(done.stdout)}


@rows("a signal's handler that reads the engine", accumulate=ONE)
def handler(t: Any) -> dict[str, Any]:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        t.start()
        for step in range(3):
            loss = t.loss(step)
            os.kill(os.getpid(), signal.SIGUSR1)
            t.engine.backward(loss)
            t.engine.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return {"seen": seen}


@rows("`gc.collect()` everywhere, and `gc.disable()`")
def collected(t: Any) -> None:
    t.start()
    gc.disable()
    try:
        for step in t.steps(2):
            loss = t.loss(step)
            gc.collect()
            t.engine.backward(loss)
            gc.collect()
            t.engine.step()
            gc.collect()
    finally:
        gc.enable()


@rows("a model to which only the engine has a reference")
def only_engine(t: Any) -> dict[str, Any]:
    t.start(nets.build())
    alive = weakref.ref(t.model)
    gc.collect()
    t.train(2)
    return {"alive": alive() is not None}


@rows("an engine in a cycle of references, closed")
def cycle(t: Any) -> None:
    t.start()
    t.model.owner = [t.engine.optimizer]
    t.train(2)
    t.model.owner.append(t.model.owner)
    gc.collect()


@rows("losses kept in a list without `detach`")
def losses_kept(t: Any) -> dict[str, Any]:
    t.start()
    kept = []
    for step in t.steps(3):
        loss = t.loss(step)
        kept.append(loss)
        t.engine.backward(loss)
        t.engine.step()
    return {"sum": torch.stack(kept).sum()}


@rows("warnings as errors")
def strict_warnings(t: Any) -> None:
    t.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t.train(3)


@rows("`stdout` and logging redirected")
def redirected(t: Any) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        t.start()
        t.train(2)
    logging.getLogger("penstock").setLevel(logging.ERROR)
    return {"printed": len(text.getvalue())}


@rows("`torch.random.fork_rng` and the generator's state around a step")
def random_state(t: Any) -> dict[str, Any]:
    t.start()
    torch.manual_seed(3)
    with torch.random.fork_rng():
        t.train(2)
        torch.rand(3)
    return {"next": torch.rand(2)}


@rows("random numbers that are drawn after training steps")
def random_kept(t: Any) -> dict[str, Any]:
    t.start()
    torch.manual_seed(3)
    t.train(2)
    return {"next": torch.rand(2)}


@rows("`torch.set_num_threads` between steps")
def threads_set(t: Any) -> None:
    t.start()
    t.train(1)
    torch.set_num_threads(2)
    try:
        t.train(1, start=1)
    finally:
        torch.set_num_threads(1)


@rows("`dist.all_reduce` of a metric by the user, between any two calls")
def metric(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in t.steps(2):
        loss = t.loss(step)
        total = loss.detach().clone()
        if not t.plain:
            dist.all_reduce(total)
        t.engine.backward(loss)
        if not t.plain:
            dist.barrier()
        t.engine.step()
        seen.append(total / t.world)
    return {"seen": seen}


@rows("an evaluation on rank 0 alone", sharded=refused("rank"), alone=either(), world=(2,))
def rank_0_alone(t: Any) -> None:
    """Where parameters are sharded the others do not come."""
    t.start(comm=SHORT)
    t.train(1)
    if t.rank == 0:
        with torch.no_grad():
            t.engine(t.batch(5)[0])
    t.train(1, start=1)


@rows("`state_dict()` on rank 0 alone", either(), sharded=refused("rank"), world=(2,))
def state_on_rank_0(t: Any) -> None:
    t.start(comm=SHORT)
    t.train(1)
    if t.rank == 0:
        t.engine.state_dict()
    t.train(1, start=1)


@rows("`step()` on rank 0 alone", refused("rank"), world=(2,), accumulate=ONE)
def step_on_rank_0(t: Any) -> None:
    t.start(comm=SHORT)
    t.engine.backward(t.loss(0))
    if t.rank == 0:
        t.engine.step()
    if not t.plain:
        t.train(1, start=1)


@rows("a frozen block on one rank alone", either(), world=(2,), precision=FP32)
def frozen_on_one(t: Any) -> None:
    """As torch: the other rank's part of the gradient, over all ranks."""
    t.start()
    t.train(1)
    block = t.model.blocks[1]
    for step in t.steps(1, start=1):
        x, y = t.batch(step)
        if not t.plain:
            block.requires_grad_(t.rank == 0)
            t.engine.backward(t.loss(step))
            t.engine.step()
            continue
        t.loss(step)
        for rank in range(2):
            block.requires_grad_(rank == 0)
            output = t.engine(x[rank::2])
            loss = torch.nn.functional.mse_loss(output, y[rank::2]) / 2
            if rank:
                loss.backward()
            else:
                t.engine.backward(loss)
        block.requires_grad_(True)
        t.engine.step()
    block.requires_grad_(True)
