"""Checkpoints from any mesh to any mesh: the same weights to the last bit, and the next step.

`pytest tests/parity/test_mesh_checkpoints.py --full` loads each of the layouts with each; without
it each is loaded with some.
"""

from __future__ import annotations

from typing import Any

import hugging_face as hf
import pytest
import torch

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5
WORLD, MICRO = 4, 4  # samples of a step, over all data ranks

MESHES: dict[str, dict[str, int]] = {
    "D4": {},
    "T2P2": {"tensor": 2, "pipeline": 2},
    "P4": {"pipeline": 4},
    "T4": {"tensor": 4},
    "D2T2": {"tensor": 2},
}
STATES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "zero3 disk": {"strategy": "zero3", "offload": {"optimizer": "disk", "params": "host"}},
}
LAYOUTS = [(mesh, state) for mesh in MESHES for state in STATES]


def start(layout: tuple[str, str], swap: str) -> Any:
    import penstock  # noqa: PLC0415

    mesh = MESHES[layout[0]]
    shared = mesh.get("tensor", 1) * mesh.get("pipeline", 1)
    made = STATES[layout[1]] | {
        "mesh": mesh,
        "batch": {"accumulate": MICRO * shared // WORLD},
        "optimizer": {"type": "AdamW"} | hf.ADAMW,
        "clip": 1.0,
        "comm": {"timeout_s": 120},
        "units": {"layer_bytes": 1},
    }
    if "offload" in made:
        made["offload"] = made["offload"] | {"path": swap}
    model = hf.build("llama", vocab_size=67, tie_word_embeddings=True)
    return penstock.initialize(model, made)


def train(engine: Any, step: int) -> float:
    """The same samples on every mesh."""
    count = MICRO // engine.data_size
    own = range(engine.data_rank * count, (engine.data_rank + 1) * count)
    return float(engine.train_batch(iter([hf.batch("llama", 10 * step + i, 0) for i in own])))


def goes(first: tuple[str, str], others: list[tuple[str, str]], path: str) -> dict[str, Any]:
    engine = start(first, path)
    for step in range(2):
        train(engine, step)
    engine.save(path, "one")
    saved = engine.state_dict(rank0_only=False)
    told: dict[str, Any] = {"loss": train(engine, 2), "others": {}}
    after = engine.state_dict(rank0_only=False)
    engine.close()
    for other in others:
        engine = start(other, path)
        engine.load(path, "one")
        loaded = engine.state_dict(rank0_only=False)
        same = list(saved) == list(loaded) and all(
            torch.equal(saved[name], one) for name, one in loaded.items()
        )
        loss = train(engine, 2)
        apart = hf.far(engine.state_dict(rank0_only=False), after)
        engine.close()
        told["others"][other] = (same, abs(loss - told["loss"]), apart)
    return told


def pytest_generate_tests(metafunc):
    if "first" not in metafunc.fixturenames:
        return
    cases = []
    for i, first in enumerate(LAYOUTS):
        some = [LAYOUTS[(i + step) % len(LAYOUTS)] for step in (1, 5, 8, 13)]
        others = LAYOUTS if metafunc.config.getoption("full") else some
        cases.append(pytest.param(first, others, id="-".join(first).replace(" ", "_")))
    metafunc.parametrize(("first", "others"), cases)


def test_loads_with_any(first, others, pools, tmp_path):
    for told in pools(WORLD).run(goes, first, others, str(tmp_path), timeout=280):
        for other, (same, loss, apart) in told["others"].items():
            assert same, f"{first} to {other}: other weights"
            assert loss < LIMIT and apart < LIMIT, f"{first} to {other}: {loss}, {apart}"
