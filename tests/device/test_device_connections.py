"""How ranks connect on their devices, in which order they launch, and how they part."""

from __future__ import annotations

import contextlib
import os
import time

import models
import on_device
import pytest
import torch
import torch.distributed as dist
import training
from ranks import Pool
from training import Case

pytestmark = pytest.mark.skipif(on_device.NAME != "sim", reason="the simulated device connects so")

HOST = {"optimizer": "host", "params": "host"}


def start(strategy="zero3", timeout_s=60, **config):
    """An engine with one exchange per unit, and a call that makes a step of it."""
    apart = {"prefetch_bytes": 0, "comm": {"timeout_s": timeout_s, "bucket_bytes": 0}}
    return on_device.start(strategy, **(apart | config))


def fail_to_connect(how):
    """Rank 1 does something else when its peers connect; what initialize() raised, and when."""
    from penstock.front import device_backends  # noqa: PLC0415

    made = device_backends.DeviceGroups.__call__

    def late(self, members):
        if dist.get_rank() == 1 and how == "ends":
            os._exit(0)
        if dist.get_rank() == 1 and how == "raises":
            raise ValueError("no such network")
        if dist.get_rank() == 1:
            time.sleep(12)
        return made(self, members)

    began = time.monotonic()
    device_backends.DeviceGroups.__call__ = late
    try:
        engine, _ = start(timeout_s=4)
        engine.close(gather=False)
        return "", 0.0
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        device_backends.DeviceGroups.__call__ = made


@pytest.mark.parametrize("how", ("ends", "raises", "waits"))
def test_ranks_that_do_not_connect(how):
    """initialize() ends on the other rank, although NCCL itself would wait for ever."""
    pool = Pool(2)
    try:
        pool.start(fail_to_connect, how)
        said, seconds = pool.outcomes({0}, 60)[0]
    finally:
        pool.kill()
    assert said.startswith("RuntimeFault: ") and "did not connect" in said, said
    assert "rank 1" in said and seconds < 15


def close_alone(waits):
    """Rank 0 closes and gathers nothing, while rank 1 is not done; how long that took."""
    engine, step = start("zero2")
    step()
    if dist.get_rank() == 1:
        time.sleep(waits)
    began = time.monotonic()
    engine.close(gather=False)
    took = time.monotonic() - began
    dist.barrier()
    return took


def test_a_rank_closes_alone(device_pools):
    assert max(device_pools(2).run(close_alone, 8)) < 6


def read_alone():
    """Rank 0 reads a number for which its device waits for rank 1, which is busy; what that raised,
    and when."""
    engine, step = start("zero3", timeout_s=4)
    step()
    if dist.get_rank() == 1:
        time.sleep(14)
        with contextlib.suppress(Exception):
            engine.close(gather=False)
        return "", 0.0
    began = time.monotonic()
    try:
        batch = models.batches("gpt", 1, Case("zero3").samples)[0]
        place = on_device.device()
        engine(*training.sent(training.rank_part(batch, 0), place)).item()
        torch.accelerator.synchronize()
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        with contextlib.suppress(Exception):
            engine.close(gather=False)
    return "trained", time.monotonic() - began


def test_a_device_that_waits_alone():
    """No exchange of the host waits: somebody looks at how long the device takes."""
    pool = Pool(2)
    try:
        pool.start(read_alone)
        said, seconds = pool.outcomes({0, 1}, 90)[0]
    finally:
        pool.kill()
    assert said.startswith("RuntimeFault: ") and "the device has not finished" in said, said
    assert seconds < 12


def launches(offload, seed):
    """Trains while each rank's threads issue collectives after delays of their own."""
    import sim  # noqa: PLC0415

    engine, step = start("zero3", 20, offload=offload)
    sim.set_seed(7 * seed + dist.get_rank())
    sim.set_delays_us(0, 400)
    sim.set_issue_delay_us(3000 * dist.get_rank())
    try:
        for _ in range(4):
            step()
    finally:
        sim.set_delays_us(0, 50)
        sim.set_issue_delay_us(0)
        with contextlib.suppress(Exception):  # after an error its weights are gone
            engine.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offload", ({}, HOST, {"gradients": "host", "optimizer": "host"}))
def test_lanes_launch_in_one_order(offload, seed, device_pools):
    """Gathers and reductions have communicators of their own, and may have threads of their own.
    The simulated device compares the order in which both are launched."""
    device_pools(2).run(launches, offload, seed)
