"""A rank that is killed while ranks compute one model together: every other one ends soon and names
it, whatever they were in.

`pytest tests/parity/test_mesh_kills.py --full` kills 50 times; without it a few.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import meshes
import pytest
import torch.distributed as dist
from ranks import Failure

pytestmark = pytest.mark.timeout(480)
DAILY, ALL = 3, 50
TIMEOUT_S = 10
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "zero3 disk"]
MESHES = [
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "data": 2},
    {"tensor": 2, "data": 2},
]


def draw(seed: int) -> tuple[meshes.Case, int, float]:
    """A mesh, who is killed, and after how many seconds of training."""
    rng = random.Random(f"kill {seed}")
    mesh = rng.choice(MESHES)
    steps = rng.choice(["three", "eight"])
    case = meshes.Case(
        tuple(mesh.items()), rng.choice(STRATEGIES), rng.choice(["mlp tied", "llama"]), steps
    )
    return case, rng.randrange(case.world), rng.uniform(0.0, 3.0)


def dies(seed: int, path: str) -> str:
    import penstock  # noqa: PLC0415

    case, victim, seconds = draw(seed)
    model = meshes.MODELS[case.model][0]()
    config = case.config(path)
    config["comm"]["timeout_s"] = TIMEOUT_S
    engine = penstock.initialize(model, config)
    if dist.get_rank() == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    told = ""
    try:
        for step in range(10_000):
            engine.train_batch(meshes.parts_of(case, step, engine.data_rank))
    except RuntimeError as error:
        told = str(error)
    try:
        engine.close()
    except RuntimeError as error:
        told += "\n" + str(error)
    return told


def pytest_generate_tests(metafunc):
    count = ALL if metafunc.config.getoption("full") else DAILY
    metafunc.parametrize("seed", range(count))


def test_all_others_end_and_name_it(seed, pools, tmp_path):
    case, victim, seconds = draw(seed)
    pool = pools(case.world)
    pool.start(dies, seed, str(tmp_path))
    others = set(range(case.world)) - {victim}
    starting = 60  # on busy cores
    told: dict[int, Any] = pool.outcomes(others, starting + seconds + 3 * TIMEOUT_S)
    pool.kill()
    assert set(told) == others, f"{case.name}: {others - set(told)} went on without rank {victim}"
    for rank, one in told.items():
        text = one.text if isinstance(one, Failure) else one
        assert f"rank {victim} is dead or stopped" in text, f"{case.name}, rank {rank}: {text}"
