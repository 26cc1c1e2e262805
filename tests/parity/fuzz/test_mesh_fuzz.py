"""Random meshes, schedules, strategies and models against plain torch in one process.

`pytest tests/parity/fuzz/test_mesh_fuzz.py` runs a few seeds on at most four ranks, `--seeds 0-300`
as many as one likes, on up to eight. A failure prints its case and the command that runs it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compare
import mesh_draw
import meshes
import pipeline_models
import pytest
import torch
import torch.distributed as dist
from fuzz_plain import lr_factor
from mesh_draw import MeshCase
from models import fill
from test_fuzz import seeds
from torch import nn

pytestmark = pytest.mark.timeout(480)
DAILY = "0-9"
LIMIT = 1e-5


def build(case: MeshCase) -> nn.Module:
    model = fill(pipeline_models.Chain(case.layers, **dict(case.model)), 3)
    for index in case.frozen:
        model.blocks[index].requires_grad_(False)
    return model


def parts_of(case: MeshCase, step: int, data: int) -> Iterator[Any]:
    """The micro-batches of a data rank: of other lengths, with fewer rows in the last."""
    for micro in range(case.micro):
        rows = case.rows - (micro > 0 and micro + 1 == case.micro)
        yield pipeline_models.batch(100 * step + micro, data, 1, rows, length=5 + micro % 2)


def plain(case: MeshCase) -> dict[str, Any]:
    """By one process."""
    model = build(case)
    params = [one for one in model.parameters() if one.requires_grad]
    optimizer = getattr(torch.optim, case.optimizer)(params, **dict(case.options))
    settings = dict(case.settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    told: dict[str, Any] = {"losses": [], "norms": []}
    count = case.micro * case.data
    for step in range(mesh_draw.STEPS):
        optimizer.zero_grad()
        total = 0.0
        for data in range(case.data):
            for part in parts_of(case, step, data):
                loss = model(**part) / count
                loss.backward()
                total += float(loss.detach())
        told["losses"].append(total)
        clip = settings["clip"] or float("inf")
        told["norms"].append(float(nn.utils.clip_grad_norm_(params, clip)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            if "schedule" in settings:
                group["lr"] = peak * lr_factor(step + 1, **settings["schedule"])
        optimizer.step()
    told["weights"] = {name: one.detach() for name, one in model.named_parameters()}
    return told


def run(case: MeshCase, path: str) -> dict[str, Any]:
    """On a rank: what the engine trains, and on rank 0 how far that is from plain torch."""
    import penstock  # noqa: PLC0415

    model = build(case)
    engine = penstock.initialize(model, case.config(path))
    losses, norms = [], []
    for step in range(mesh_draw.STEPS):
        losses.append(float(engine.train_batch(parts_of(case, step, engine.data_rank))))
        norms.append(engine.grad_norm)
    engine.close()
    told: dict[str, Any] = {"hash": meshes.hash_of(model), "losses": losses, "norms": norms}
    if dist.get_rank() > 0:
        return told
    theirs = plain(case)
    pairs = zip(norms, theirs["norms"], strict=True)
    told["apart"] = {
        "losses": max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True)),
        "norms": max(abs(a - b) / b for a, b in pairs),
        "weights": compare.weight_deviation(
            {name: one.detach() for name, one in model.named_parameters()}, theirs["weights"]
        ),
    }
    return told


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config.getoption("seeds") or DAILY))


def test_mesh_fuzz(seed, pools, tmp_path, largest, request):
    daily = not request.config.getoption("seeds")
    case = mesh_draw.make(seed, mesh_draw.DAILY_WORLD if daily else 8)
    try:
        told = pools(case.world).run(run, case, str(tmp_path), timeout=200)
        assert len({one["hash"] for one in told}) == 1, "replicas differ"
        for what in ("losses", "norms"):
            assert all(one[what] == told[0][what] for one in told), f"ranks differ in {what}"
        compare.check(
            largest, "mesh fuzz", dict.fromkeys(told[0]["apart"], LIMIT), told[0]["apart"]
        )
    except AssertionError as error:
        command = f"pytest tests/parity/fuzz/test_mesh_fuzz.py --seeds {seed}"
        pytest.fail(f"{error}\nseed {seed}, again by: {command}\n{case}", pytrace=False)
