"""Where state rests, and when what is queued on a device runs, changes no answer: every strategy
and tier on an accelerator against plain torch on it.

`pytest tests/device` takes a sample; `--full` the whole matrix. PENSTOCK_TEST_DEVICE=cuda takes
another device than the simulated one, with as many ranks as there are of it.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib

import compare
import on_device
import pytest
from training import Case

HOST, DISK = "host", "disk"
TIERS = {
    "device": {},
    "optimizer-host": {"optimizer": HOST},
    "optimizer-disk": {"optimizer": DISK},
    "gradients-host": {"optimizer": HOST, "gradients": HOST},
    "all-host": {"optimizer": HOST, "params": HOST, "gradients": HOST},
    "all-disk": {"optimizer": DISK, "params": DISK, "gradients": DISK},
}
# What the matrix does not have, with the other tiers of gradients, by name: a model, the groups of
# the optimizer and more of the config.
WAYS = {
    "groups": ("gpt", True, {}),
    "buffers": ("conv_net", False, {"activations": {"checkpoint": "unit"}}),
    "experts": ("moe", True, {}),
}
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hpz", "mics"]
SHARDED = {"zero3", "hpz", "mics"}  # parameters rest in pieces, so they can rest elsewhere
SEEDS = 3
SAMPLE, SAMPLED_WAYS = 24, 6


def matrix() -> list[tuple[Case, str]]:
    cells = []
    worlds = {world for world in (1, 2, 4) if world <= on_device.count()}
    if on_device.NAME != "sim":
        worlds.add(on_device.count())
    for world, strategy, tier, precision in itertools.product(
        sorted(worlds), STRATEGIES, TIERS, ["fp32", "bf16", "fp16"]
    ):
        if tier == "gradients-host" or (tier.startswith("all") and strategy not in SHARDED):
            continue
        if world % 2 and strategy in ("hpz", "mics"):  # they need two nodes
            continue
        for accumulate, recompute in ((1, "off"), (3, "off"), (1, "nonreentrant")):
            model = "awkward" if (len(cells) % 2) else "gpt"
            clip = len(cells) % 3 == 0
            cells.append(
                (Case(strategy, precision, accumulate, world, recompute, model, clip), tier)
            )
    return cells


def ways() -> list[tuple[Case, str, str]]:
    """The ways with two backwards and gradients on both sides."""
    cells = []
    worlds = [world for world in (1, 2, 4) if world <= on_device.count()]
    for world, strategy, tier, precision, way in itertools.product(
        worlds, STRATEGIES, ["device", "gradients-host"], ["fp32", "bf16"], WAYS
    ):
        if tier != "device" and strategy in ("ddp", "zero1"):
            continue  # their gradients are whole, so they stay on the device
        if world < 4 and strategy in ("hpz", "mics"):
            continue
        model, _, _ = WAYS[way]
        cells.append((Case(strategy, precision, 2, world, model=model), tier, way))
    return cells


def sample() -> list[tuple[Case, str]]:
    """Every strategy with every tier it has, in some precision and loop: on simulated devices with
    the fewest ranks that exchange something, on others with a rank on each device."""
    shuffled = matrix()
    random.Random(3).shuffle(shuffled)
    simulated = on_device.NAME == "sim"
    shuffled.sort(key=lambda cell: abs(cell[0].world - 2) if simulated else -cell[0].world)
    first = {}
    for case, tier in shuffled:
        first.setdefault((case.strategy, tier), (case, tier))
    rest = [cell for cell in shuffled if cell not in first.values()]
    return [*first.values(), *rest][:SAMPLE]


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("full")
    if "way" in metafunc.fixturenames:
        chosen = ways() if full else random.Random(5).sample(ways(), SAMPLED_WAYS)
        ids = [f"{case}-{tier}-{way}" for case, tier, way in chosen]
        metafunc.parametrize(("case", "tier", "way"), chosen, ids=ids)
    if "cell" in metafunc.fixturenames:
        chosen = matrix() if full else sample()
        metafunc.parametrize("cell", chosen, ids=[f"{case}-{tier}" for case, tier in chosen])


_references: dict[tuple, object] = {}


def reference(pools, asked):
    if asked not in _references:
        _references[asked] = pools(1).run(on_device.reference, asked)[0]
    return _references[asked]


@pytest.fixture
def schedules(request):
    """The seeds of the simulated device's order: all with --full, else one that differs by case."""
    if on_device.NAME != "sim":
        return [0]
    if request.config.getoption("full"):
        return list(range(SEEDS))
    return [zlib.crc32(request.node.name.encode()) % SEEDS]


def test_device_parity(cell, schedules, device_pools, largest, tmp_path):
    case, tier = cell
    # Both ways of summing low precision: by the ranks, and by the back end.
    wide = {"reduce_dtype": "fp32"} if case.accumulate > 1 else {}
    comm = case.config()["comm"] | wide
    train = functools.partial(on_device.train, offload=TIERS[tier], comm=comm)
    for seed in schedules:
        outcomes = device_pools(case.world).run(train, case, seed, str(tmp_path))
        compare.assert_equal(case, outcomes, largest, functools.partial(reference, device_pools))


def test_other_ways(case, tier, way, schedules, device_pools, largest):
    _, grouped, more = WAYS[way]
    train = functools.partial(on_device.train, grouped=grouped, offload=TIERS[tier], **more)
    for seed in schedules:
        outcomes = device_pools(case.world).run(train, case, seed, "")
        compare.assert_equal(case, outcomes, largest, functools.partial(reference, device_pools))


def test_matrix_is_not_small():
    assert on_device.NAME != "sim" or (len(matrix()) >= 558 and len(ways()) >= 100)
