"""No hang where ranks wait for one another on a device, which the host does not see."""

from __future__ import annotations

import contextlib
import os

import faults
import on_device
import pytest
import sim
import torch.distributed as dist
from faults import EVERY, FAULTS
from ranks import Pool

OFFLOAD = {
    "": {},
    "optimizer": {"optimizer": "host"},
    "all": {"optimizer": "host", "params": "host"},
}
DAILY = [
    ("raises in forward", "zero3", ""),
    ("raises in forward", "ddp", ""),
    ("raises in backward", "zero3", "all"),
    ("raises in step", "zero2", "optimizer"),
    ("killed", "zero3", ""),
    ("killed", "zero2", "optimizer"),
    ("stopped", "zero3", ""),
    ("reverses its units", "zero3", ""),
    ("leaves its loop and closes", "zero3", ""),
    ("leaves its process", "zero3", "all"),
]


def needs(world):
    """Skips where a pool of its own would put two ranks on one device, which NCCL refuses."""
    if on_device.count() < world:
        pytest.skip(f"needs {world} devices")


def pytest_generate_tests(metafunc):
    if "name" not in metafunc.fixturenames:
        return
    chosen = DAILY
    if metafunc.config.getoption("full"):
        chosen = [(n, s, o) for n in FAULTS for s in sorted(EVERY) for o in OFFLOAD]
        chosen = [(n, s, o) for n, s, o in chosen if s in faults.FREES_PARAMS or o != "all"]
    metafunc.parametrize(("name", "strategy", "offload"), chosen)


def test_fault(name, strategy, offload, device_pools):
    needs(faults.WORLD)
    faults.check(name, strategy, 1, device_pools, accelerated=True, offload=OFFLOAD[offload])


def start(strategy, offload, mesh=None):
    """An engine with a timeout that nobody waits for, and a call that makes a step of it."""
    return on_device.start(strategy, comm={"timeout_s": 300}, offload=offload, mesh=mesh or {})


def raise_on_one(where, strategy, offload, mesh=None):
    """Rank 1 raises in a step; all close their engines."""
    engine, step = start(strategy, offload, mesh)
    step()
    before = engine.state_dict(rank0_only=False)
    said = "trained"
    if dist.get_rank() == 1:
        getattr(faults, f"raise_in_{where}")(engine, engine.module)
    try:
        try:
            step()
            step()
        finally:
            engine.close()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = {name: param.detach().cpu() for name, param in engine.module.named_parameters()}
    assert all(after[name].equal(before[name].cpu()) for name in after), "these are other weights"
    return said


@pytest.mark.parametrize(
    ("where", "strategy", "offload"),
    [("forward", "zero3", ""), ("backward", "zero3", "all"), ("backward", "ddp", "")],
)
def test_weights_come_back(where, strategy, offload, device_pools):
    outcomes = device_pools(2).run(raise_on_one, where, strategy, OFFLOAD[offload], timeout=180)
    waited, raised = outcomes
    assert raised == "ValueError: this rank's data is bad"
    assert waited.startswith("RuntimeFault: ") and "rank 1" in waited
    assert "this rank's data is bad" in waited


def raise_after_step(strategy, raises):
    """New weights are on their way when rank 1 raises."""
    engine, step = start(strategy, {})
    step()
    sim.set_delays_us(1000, 2000)
    step()
    try:
        if raises:
            if dist.get_rank() == 1:
                faults.raise_in_forward(engine, engine.module)
            step()
    except Exception as error:
        assert dist.get_rank() == 1 or "rank 1" in str(error)
    finally:
        engine.close()
        sim.set_delays_us(0, 50)
    return [param.detach().cpu() for param in engine.module.parameters()]


@pytest.mark.skipif(on_device.NAME != "sim", reason="only there can the device be made slow")
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_what_is_published_arrives(strategy, device_pools):
    pool = device_pools(2)
    undisturbed = pool.run(raise_after_step, strategy, False, timeout=180)
    disturbed = pool.run(raise_after_step, strategy, True, timeout=180)
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert all(one.equal(other) for one, other in zip(before, after, strict=True))


def leave_on_one():
    """Rank 1's process ends, while the other waits for a number that the device never makes."""
    engine, step = start("zero3", {})
    step()
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        while True:
            step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(Exception):  # its weights are gone
            engine.close()


def test_a_process_that_ends_is_noticed_at_once():
    needs(2)
    pool = Pool(2)
    try:
        pool.start(leave_on_one)
        said = pool.outcomes({0}, 180)
        assert said and said[0].startswith("RuntimeFault: "), said
        assert "rank 1 is dead or stopped" in said[0]
    finally:
        pool.kill()
