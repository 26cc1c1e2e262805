"""Stages of a pipeline on engines: losses, gradients, norms and weights of plain torch in one
process, for every strategy."""

from __future__ import annotations

import json
import re
from typing import Any

import pipeline_models as models
import pytest
import torch

pytestmark = pytest.mark.timeout(480)
GRADIENT_LIMIT, WEIGHT_LIMIT = 1e-6, 1e-5
STEPS = 3


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def trained(
    strategy: str,
    mesh: dict[str, int],
    micro: int,
    options: dict[str, Any],
    config: dict[str, Any],
    layer_bytes: int = 1,
) -> dict[str, Any]:
    """On a rank: how far each is from plain torch."""
    import penstock  # noqa: PLC0415

    settings = {
        "strategy": strategy,
        "mesh": mesh,
        "batch": {"accumulate": micro},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1},
        "comm": {"timeout_s": 120},
        "units": {"layer_bytes": layer_bytes},
    }
    engine = penstock.initialize(models.build(**options), settings | config)
    losses, norms = [], []
    told: dict[str, Any] = {}
    for step in range(STEPS):
        losses.append(float(engine.train_batch(models.batch(step, engine.data_rank, micro))))
        norms.append(engine.grad_norm)
    data = engine.data_size
    weights = engine.state_dict(rank0_only=False)
    evaluated = float(engine.eval_batch(models.batch(9, engine.data_rank, micro)))
    engine.close()
    expected = models.plain(models.build(**options), STEPS, data, micro, clip=config.get("clip"))
    told["losses"] = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
    told["norms"] = max(abs(a - b) / b for a, b in zip(norms, expected["norms"], strict=True))
    told["weights"] = max(far(weights[n], one) for n, one in expected["weights"].items())
    model = models.build(**options)
    model.load_state_dict({n: p for n, p in weights.items()})
    told["evaluated"] = evaluated
    return told


def near(told: dict[str, Any]) -> None:
    assert told["losses"] < WEIGHT_LIMIT and told["norms"] < WEIGHT_LIMIT, told
    assert told["weights"] < WEIGHT_LIMIT, told


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"own": True}, {"skip": True}], ids=str)
@pytest.mark.parametrize("layer_bytes", [1, 1 << 20])  # of its own stage, or on all of them
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_trains_in_two_stages(strategy, options, layer_bytes, pools):
    for told in pools(2).run(trained, strategy, {"pipeline": 2}, 4, options, {}, layer_bytes):
        near(told)


ZERO_BUBBLE = {"parallel": {"schedule": "zero_bubble"}}
RULES = {"*.up": "column", "*.down": "row", "tokens": "vocab", "head": "vocab"}
DISK = {"optimizer": "disk", "path": "/tmp"}
MESHES = [
    ({"pipeline": 4}, 4, {"tied": True}, {}),
    ({"pipeline": 4}, 5, {"tied": True, "own": True}, {"clip": 0.5}),
    ({"pipeline": 2}, 4, {"tied": True}, {"clip": 0.5}),
    ({"pipeline": 2}, 3, {"own": True}, {"parallel": {"schedule": "gpipe"}}),
    ({"pipeline": 2, "tensor": 2}, 2, {}, {"parallel": {"rules": RULES}}),
    ({"pipeline": 2, "tensor": 2}, 2, {"tied": True}, {"parallel": {"rules": RULES}}),
    (
        {"pipeline": 2},
        4,
        {"layers": 6},
        {"parallel": {"schedule": "interleaved", "virtual_stages": 2}},
    ),
    (
        {"pipeline": 2},
        3,
        {"layers": 6, "tied": True},
        {"parallel": {"schedule": "gpipe", "virtual_stages": 2}},
    ),
    ({"pipeline": 2}, 4, {}, ZERO_BUBBLE),
    (
        {"pipeline": 2},
        5,
        {"tied": True, "skip": True},
        ZERO_BUBBLE | {"units": {"layer_bytes": 1 << 20}},
    ),
    ({"pipeline": 4}, 5, {"tied": True, "own": True}, ZERO_BUBBLE | {"clip": 0.5}),
    ({"pipeline": 2}, 3, {}, ZERO_BUBBLE | {"offload": {"optimizer": "host"}}),
    ({"pipeline": 2}, 3, {"own": True}, {"offload": {"optimizer": "host"}}),
    ({"pipeline": 2}, 2, {"tied": True}, {"activations": {"checkpoint": "unit"}}),
    ({"pipeline": 2}, 2, {}, {"parallel": {"stages": ["blocks.1"]}}),
]


@pytest.mark.parametrize(("mesh", "micro", "options", "config"), MESHES, ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_trains(strategy, mesh, micro, options, config, pools):
    for told in pools(4).run(trained, strategy, mesh, micro, options, config):
        near(told)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_split_backwards_with_gradients_elsewhere(strategy, tier, pools, tmp_path):
    offload = {"optimizer": tier, "gradients": tier, "path": str(tmp_path)}
    if tier == "host":
        del offload["path"]
    config = ZERO_BUBBLE | {"offload": offload}
    for told in pools(4).run(trained, strategy, {"pipeline": 2}, 3, {}, config):
        near(told)


def exchanges(mesh: dict[str, int], micro: int, config: dict[str, Any]) -> int:
    """On a rank: with others, in the second step."""
    import penstock  # noqa: PLC0415

    settings = {"strategy": "zero3", "mesh": mesh, "batch": {"accumulate": micro}}
    engine = penstock.initialize(models.build(), settings | config)
    for step in range(2):
        engine.train_batch(models.batch(step, engine.data_rank, micro))
    count = engine.ledger()["measured"]["exchanges"]
    engine.close()
    return int(count)


HELD = {"table": {"param": {"hold": "RR@device:fp32"}}}
INTERLEAVED = {"parallel": {"schedule": "interleaved", "virtual_stages": 2}}


@pytest.mark.parametrize(
    ("mesh", "config", "stages"),
    [({}, {}, 1), ({"pipeline": 2}, {}, 1), ({"pipeline": 2}, INTERLEAVED, 2)],
    ids=["no pipeline", "1f1b", "interleaved"],
)
def test_held_parameters_are_gathered_once_a_step(mesh, config, stages, pools):
    """Of what a further micro-batch exchanges, the sums of gradients are left."""
    run = pools(2 * mesh.get("pipeline", 1)).run

    def further(config: dict[str, Any]) -> float:
        few, many = (run(exchanges, mesh, micro, config)[0] for micro in (2, 6))
        return (many - few) / 4

    assert further(config) == 3 * stages
    assert further(config | HELD) == stages


def account(strategy: str, config: dict[str, Any]) -> list[tuple[int, int]]:
    """On a rank: peaks of parameters, gradients and all state, measured and predicted."""
    import penstock  # noqa: PLC0415

    settings = {"strategy": strategy, "mesh": {"pipeline": 2}, "batch": {"accumulate": 4}}
    settings |= {"prefetch_bytes": 0, "units": {"layer_bytes": 1}}
    engine = penstock.initialize(models.build(layers=8), settings | config)
    for step in range(3):
        engine.train_batch(models.batch(step, engine.data_rank, 4))
    ledger = engine.ledger()
    engine.close()
    both = ledger["measured"], ledger["predicted"][strategy]
    return [(both[0][name], both[1][name]) for name in ("param", "grad", "total")]


@pytest.mark.parametrize("config", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_the_ledger_plans_windows(strategy, config, pools):
    """Stages of a rank gather their units one stage at a time."""
    for told in pools(4).run(account, strategy, config):
        for measured, predicted in told:
            assert 0.9 <= measured / predicted <= 1.1, told


def watched(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """Explain text, run.json and the predicted lines of a run of four steps, on rank 0."""
    import pathlib  # noqa: PLC0415

    import penstock  # noqa: PLC0415
    from penstock.monitor import predicted, run  # noqa: PLC0415

    folder = pathlib.Path(path)
    monitor = {"path": str(folder / "run"), "machine": str(folder / "machine.json")}
    engine = penstock.initialize(models.build(), settings | {"monitor": monitor})
    for step in range(4):
        if step == 2:
            engine.trace(folder / "run" / "trace.json", 2)
        engine.train_batch(models.batch(step, engine.data_rank, 4))
    told: dict[str, Any] = {"explain": engine.explain()}
    try:
        engine._core.set_plan_text("forward", "")
    except penstock.ConfigError as error:
        told["refused"] = str(error)
    engine.close()
    if torch.distributed.get_rank() > 0:
        return told
    found = run.read(folder / "run")
    lines = {line.name: line.predicted for line in predicted.lines(found.trace)}
    return told | {"about": found.about, "lines": lines}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        INTERLEAVED["parallel"],
        ZERO_BUBBLE["parallel"],
    ],
    ids=str,
)
def test_the_window_is_planned_and_predicted(strategy, schedule, pools, tmp_path):
    stages = 2 if "virtual_stages" in schedule else 1
    settings = {
        "strategy": strategy,
        "mesh": {"pipeline": 2},
        "parallel": schedule,
        "batch": {"accumulate": 4},
    }
    machine = {"flops": 1e10, "local": 1e9, "device_memory": 5e9}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    told = pools(4).run(watched, settings, str(tmp_path))[0]
    assert "its stages run the plans" in told["refused"]
    plan = told["about"]["plan"]["window"]
    assert f"plan window\n{plan}" in told["explain"] and "plan forward\n" not in told["explain"]
    messages = [line for line in plan.splitlines() if line.startswith(("send", "recv"))]
    # The first rank's first stage receives no inputs and sends no gradients of them.
    assert len(messages) == 4 * (2 + 4 * (stages - 1))
    # Two samples of six tokens, 16 values each, and what the text of the message needs.
    found = re.search(r"messages to other stages, .*: (\d+) bytes", told["explain"])
    assert found and 2 * 6 * 16 * 4 <= int(found[1]) < 2 * 6 * 16 * 4 + 500
    assert told["about"]["predicted"]["step_s"] > 0
    # The rank has two blocks (with two stages per rank, one in each), with two products of 16 by 32
    # weights.
    forward = [ms for name, ms in told["lines"].items() if name.startswith("forward u")]
    products = 4 * 2 * 2 * (2 * 12 * 16 * 32)
    assert sum(forward) == pytest.approx(1e3 * products / 1e10, rel=0.01)
