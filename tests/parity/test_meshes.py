"""All meshes x strategies x models: the steps are those of plain torch in one process, and replicas
are equal to the last bit.

`pytest tests/parity/test_meshes.py --full -n 2 --dist worksteal` runs 20 steps of every case;
without `--full` a sample runs, in which every mesh, strategy, model and kind of step occurs.
"""

from __future__ import annotations

import meshes
import pytest

pytestmark = pytest.mark.timeout(480)
FIRST_LIMIT, EACH_LIMIT, WEIGHT_LIMIT = 1e-6, 1e-4, 1e-5
SAMPLED_STEPS = 6
STRIDE = 39  # which the numbers of strategies, models and kinds of steps have no part with


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    cases = meshes.all_cases()
    chosen = cases if metafunc.config.getoption("full") else cases[::STRIDE]
    chosen = sorted(chosen, key=lambda one: one.world)  # pools of one size after the other
    metafunc.parametrize("case", chosen, ids=[one.name for one in chosen])


def test_trains(case, pools, tmp_path, largest, request):
    steps = meshes.STEPS if request.config.getoption("full") else SAMPLED_STEPS
    check(
        pools(case.world).run(meshes.run, case, str(tmp_path), "cpu", steps, timeout=200), largest
    )


def check(told, largest):
    """Also of test_device_meshes.py."""
    assert len({one["hash"] for one in told}) == 1, "replicas differ"
    assert all(one["losses"] == told[0]["losses"] for one in told)
    apart = told[0]["apart"]
    for name, value in apart.items():
        largest[f"mesh {name}"] = max(value, largest.get(f"mesh {name}", 0.0))
    assert apart["first"] < FIRST_LIMIT and apart["each"] < EACH_LIMIT, apart
    assert apart["losses"] < WEIGHT_LIMIT and apart["weights"] < WEIGHT_LIMIT, apart


def test_enough_cases_and_the_sample_has_all():
    cases = meshes.all_cases()
    assert len(cases) >= 400
    check_has_all(cases[::STRIDE])


def check_has_all(sample, kinds=("mesh", "strategy", "model", "steps")):
    """Also of test_device_meshes.py."""
    wanted = {
        "mesh": [tuple(one.items()) for one in meshes.MESHES],
        "strategy": list(meshes.STRATEGIES),
        "model": list(meshes.MODELS),
        "steps": list(meshes.IN_TURN),
    }
    for kind in kinds:
        found = {getattr(one, kind) for one in sample}
        assert found >= set(wanted[kind]), kind
