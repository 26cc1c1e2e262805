"""How ranks connect on their devices, in which order they launch, and how they part."""

from __future__ import annotations

import contextlib
import os
import time

import models
import on_device
import pytest
import sim
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
            time.sleep(120)
        return made(self, members)

    dist.barrier()
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
        said, seconds = pool.outcomes({0}, 180)[0]
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
    engine, step = start("zero3", timeout_s=10)  # less is too short for a busy machine
    step()
    if dist.get_rank() == 1:
        time.sleep(28)
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
        said, seconds = pool.outcomes({0, 1}, 240)[0]
    finally:
        pool.kill()
    assert said.startswith("RuntimeFault: ") and "the device has not finished" in said, said
    assert seconds < 24


def launches(offload, seed):
    """Trains while each rank's threads issue collectives after delays of their own."""
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


class Choosing(torch.nn.Module):
    """Blocks of two layers, of which some ranks use one only."""

    def __init__(self):
        super().__init__()
        blocks = [torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2)) for _ in range(5)]
        self.blocks = torch.nn.ModuleList(Chosen(block) for block in blocks)

    def forward(self, x, both):
        for i, block in enumerate(self.blocks):
            x = block(x, both or i % 2 == 0)
        return x.square().mean()


class Chosen(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, both):
        first, second = self.layers
        return torch.tanh(first(x) + second(x) if both else first(x))


def choosing():
    torch.manual_seed(3)
    return Choosing(), torch.randn(2, 4, 32)


def choose(offload, seed):
    """Trains; rank 1 has no gradient for some layers. Returns the weights."""
    import penstock  # noqa: PLC0415

    on_device.schedule(seed)
    place, rank = on_device.device(), dist.get_rank()
    model, inputs = choosing()
    config = Case("zero3").config() | {
        "optimizer": {"type": "SGD", "lr": 0.5},
        "units": {"modules": ["Chosen"]},
        "prefetch_bytes": 0,
        "offload": offload,
        "comm": {"timeout_s": 30, "bucket_bytes": 0},
    }
    engine = penstock.initialize(model, config, device=place)
    sim.set_seed(7 * seed + rank)
    sim.set_delays_us(0, 400)
    sim.set_issue_delay_us(3000 * rank)
    try:
        for _ in range(4):
            engine.backward(engine(inputs[rank].to(place), rank == 0))
            engine.step()
    finally:
        sim.set_delays_us(0, 50)
        sim.set_issue_delay_us(0)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offload", ({}, HOST, {"gradients": "host", "optimizer": "host"}))
def test_a_parameter_without_gradient_on_one_rank(offload, seed, device_pools):
    """The rank reduces the unit's gradients where the others do, and not after its backward."""
    model, inputs = choosing()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(4):
        (model(inputs[0], True) / 2 + model(inputs[1], False) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in device_pools(2).run(choose, offload, seed):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
