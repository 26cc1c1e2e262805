"""Tensor, sequence and pipeline ranks on an accelerator: their steps are those of plain torch in one
process on the CPU, and replicas are equal to the last bit.

`pytest tests/device/test_device_meshes.py --full` runs every third case of tests/parity/meshes.py;
without it a sample runs, in which every mesh, strategy, model and kind of step occurs.
"""

from __future__ import annotations

import meshes
import on_device
import pytest
import sim
import test_meshes
import torch.distributed as dist

pytestmark = pytest.mark.timeout(240)
# By full: the first case and the stride. The sample has every kind.
STEPS = 6
CHOSEN = {True: (1, 3), False: (5, 57)}


def chosen(full: bool) -> list[meshes.Case]:
    first, stride = CHOSEN[full]
    cases = [one for one in meshes.all_cases()[first::stride] if one.world <= on_device.count()]
    return sorted(cases, key=lambda one: one.world)  # pools of one size after the other


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = chosen(metafunc.config.getoption("full"))
        metafunc.parametrize("case", cases, ids=[one.name for one in cases])


def run(case, path, seed):
    on_device.schedule(seed)
    return meshes.run(case, path, on_device.device(), STEPS)


def test_trains(case, device_pools, tmp_path, largest):
    seed = sum(case.name.encode()) % 3
    told = device_pools(case.world).run(run, case, str(tmp_path), seed, timeout=200)
    test_meshes.check(told, largest)


def test_enough_cases_and_the_sample_has_all():
    if on_device.NAME != "sim":
        return
    assert len(chosen(True)) >= 300
    sample = chosen(False)
    for of, wanted in (
        (lambda one: dict(one.mesh), meshes.MESHES),
        (lambda one: one.strategy, list(meshes.STRATEGIES)),
        (lambda one: one.model, list(meshes.MODELS)),
        (lambda one: one.steps, list(meshes.STEPS_OF)),
    ):
        assert all(any(of(one) == value for one in sample) for value in wanted)


# ---- what only some schedules of a device show


def run_late(case, path, seed, delay_us, issue_us):
    """With slow kernels, and issues of collectives that each rank delays in its own way."""
    on_device.schedule(seed)
    sim.set_seed(7 * seed + dist.get_rank())
    sim.set_delays_us(0, delay_us)
    sim.set_issue_delay_us(issue_us * dist.get_rank())
    try:
        return meshes.run(case, path, on_device.device(), 3)
    finally:
        sim.set_delays_us(0, 50)
        sim.set_issue_delay_us(0)


def late(axis, strategy, model, steps, pools, path, largest, delay_us=400, issue_us=0):
    if on_device.NAME != "sim":
        pytest.skip("needs a device that is late on purpose")
    case = meshes.Case(((axis, 2),), strategy, model, steps)
    for seed in range(2):
        told = pools(2).run(run_late, case, str(path), seed, delay_us, issue_us, timeout=200)
        test_meshes.check(told, largest)


@pytest.mark.parametrize("strategy", ["zero1 host", "zero2 disk"])
@pytest.mark.parametrize(("axis", "model"), [("tensor", "llama"), ("pipeline", "llama tied")])
def test_gradients_on_the_host_arrive_before_model_ranks_use_them(
    axis, model, strategy, device_pools, tmp_path, largest
):
    if axis == "pipeline" and strategy == "zero2 disk":
        strategy = "zero2"  # gradients of tied weights cannot be on disk
    late(axis, strategy, model, "one", device_pools, tmp_path, largest)


@pytest.mark.parametrize("steps", ["eight", "three"])
def test_memory_of_messages_is_kept_while_it_is_used(steps, device_pools, tmp_path, largest):
    late("pipeline", "zero1", "mlp", steps, device_pools, tmp_path, largest)


@pytest.mark.parametrize("strategy", ["zero3", "zero3 host"])
def test_model_ranks_take_turns_with_the_lanes(strategy, device_pools, tmp_path, largest):
    """Sequence ranks are data ranks, so the simulated device compares the order of launches on the
    communicators of both."""
    late("sequence", strategy, "llama", "two", device_pools, tmp_path, largest, 100, 2000)
