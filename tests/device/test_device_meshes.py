"""Tensor, sequence and pipeline ranks on an accelerator: their steps are those of plain torch in one
process on the CPU, and replicas are equal to the last bit.

`pytest tests/device/test_device_meshes.py --full` runs every third case of tests/parity/meshes.py;
without it a sample runs, in which every mesh, strategy, model and kind of step occurs.
"""

from __future__ import annotations

import meshes
import on_device
import pytest
import test_meshes

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
