"""Nodes that train on their own (comm.codec "local"): the weights are those of plain AdamW on each
node with torch's SGD over the nodes, and they stay so through checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outer_nodes import (
    EVERY,
    ROWS,
    STEPS,
    Net,
    distance,
    gathered,
    reference,
    samples,
    settings_of,
    start,
    step_of,
    train,
    weights_of,
)

# Strategy, ranks, nodes, more settings.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "zero1": ("zero1", 4, 2, {}),
    "zero2": ("zero2", 4, 2, {}),
    "zero3": ("zero3", 4, 2, {}),
    "ddp": ("ddp", 2, 2, {}),
    "single": ("zero3", 3, 3, {}),
    "one_node": ("zero3", 2, 1, {}),
    "alone": ("zero3", 1, 1, {}),
    "host": ("zero2", 4, 2, {"offload": {"optimizer": "host", "gradients": "host"}}),
    "disk": ("zero3", 4, 2, {"offload": {"optimizer": "disk", "params": "host"}}),
    "chunks": (
        "zero2",
        4,
        2,
        {
            "offload": {"optimizer": "disk", "window_bytes": 65536},
            "units": {"modules": ["Sequential"]},
        },
    ),
    "late": ("zero3", 4, 2, {"offload": {"optimizer": "host", "late_update": True}}),
    "window": ("zero3", 4, 2, {"batch": {"accumulate": 2, "micro": ROWS}}),
    "gloo": ("zero3", 4, 2, {"comm": {"backend": "gloo"}}),
    "gloo_again": ("zero1", 4, 2, {"comm": {"backend": "gloo"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_plain_torch(case, pools, tmp_path):
    strategy, world, nodes, more = CASES[case]
    if "disk" in more.get("offload", {}).values():
        more = more | {"offload": more["offload"] | {"path": str(tmp_path)}}
    micro = more.get("batch", {}).get("accumulate", 1)
    expected = reference(nodes, world // nodes, micro=micro)
    found = pools(world).run(train, settings_of(strategy, nodes, **more), STEPS, micro)
    for rank, (seen, said) in enumerate(found):
        assert f"one every {EVERY} steps, over {nodes} nodes" in said
        own = expected[rank // (world // nodes)]
        for step in range(STEPS):
            assert distance(seen[step], own[step]) < 2e-5, f"rank {rank}, step {step + 1}"


@pytest.mark.parametrize("wire", ["int4/128", "int8/64", "plain"])
def test_nodes_agree_bitwise_after_an_outer_step(wire, pools):
    """Also in bf16, whose masters are apart from the parameters."""
    for precision in ("fp32", "bf16"):
        settings = settings_of("zero2", 2, precision=precision, comm={"outer_wire": wire})
        found = pools(4).run(train, settings, 2 * EVERY)
        first = found[0][0]
        for seen, _ in found[1:]:
            for step in range(2 * EVERY):
                same = distance(seen[step], first[step]) == 0
                assert same or (step + 1) % EVERY, f"step {step + 1}"
        assert distance(found[3][0][0], first[0]) > 0, "nodes see different samples"


def test_int4_stays_close_to_plain(pools):
    plain = pools(4).run(train, settings_of("zero2", 2), 4 * EVERY)[0][0][-1]
    coded = settings_of("zero2", 2, comm={"outer_wire": "int4/128"})
    found = pools(4).run(train, coded, 4 * EVERY)[0][0][-1]
    moved = distance(plain, weights_of(Net()))
    assert 0 < distance(plain, found) < 0.25 * moved


# ---- checkpoints


def save_and_go_on(settings: dict[str, Any], path: str, more: int) -> Any:
    """Saves after two outer steps; returns the weights then, and after `more` steps."""
    engine = start(settings)
    for step in range(2 * EVERY):
        step_of(engine, step)
    saved = gathered(engine)
    engine.save(path)
    for step in range(2 * EVERY, 2 * EVERY + more):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return saved, last


def load_and_go_on(settings: dict[str, Any], path: str, more: int) -> Any:
    engine = start(settings)
    assert engine.load(path) is None and engine.steps == 2 * EVERY
    loaded = gathered(engine)
    for step in range(2 * EVERY, 2 * EVERY + more):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return loaded, last


@pytest.mark.parametrize("other", ["same", "more_nodes", "one_node", "none"])
def test_checkpoints(other, pools, tmp_path):
    path, more = str(tmp_path), EVERY
    (saved, last), *_ = pools(4).run(save_and_go_on, settings_of("zero2", 2), path, more)
    loads = {
        "same": (4, settings_of("zero3", 2)),
        "more_nodes": (4, settings_of("zero1", 4)),
        "one_node": (2, settings_of("zero3", 1)),
        "none": (4, settings_of("zero3", 2) | {"comm": {"timeout_s": 60}}),
    }
    world, settings = loads[other]
    found = pools(world).run(load_and_go_on, settings, path, more)
    for loaded, _ in found:
        assert distance(loaded, saved) == 0
    if other == "same":  # both nodes go on with the moments of the first
        expected = reference(2, 2, 3 * EVERY, reload_at=2 * EVERY)
        assert distance(found[0][1], expected[0][-1]) < 2e-5
    assert 0 < distance(found[0][1], last) < 0.1


@pytest.mark.parametrize("mesh", ["tensor", "pipeline"])
def test_checkpoints_of_model_ranks(mesh, pools, tmp_path):
    world, nodes, axes, more = MESHES[mesh]
    settings, path = settings_of("zero1", nodes, mesh=axes, **more), str(tmp_path)
    saved = pools(world).run(in_pipeline, settings, EVERY, path)[0][-1]
    found = pools(world).run(in_pipeline, settings, 0, path, True)
    assert all(distance(one[-1], saved) == 0 for one in found)


def momenta_of(settings: dict[str, Any], path: str) -> Any:
    """The weights after an outer step without updates: only the momentum moves them."""
    engine = start(settings)
    engine.load(path)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(2 * EVERY, 3 * EVERY):
        step_of(engine, step)
    last = gathered(engine)
    engine.close()
    return last


def test_momenta_are_in_checkpoints(pools, tmp_path):
    path = str(tmp_path)
    pools(4).run(save_and_go_on, settings_of("zero2", 2), path, 0)
    expected = reference(2, 2, 3 * EVERY, reload_at=2 * EVERY, still=True)[0]
    assert distance(expected[-1], expected[2 * EVERY - 1]) > 1e-3
    for nodes, world in ((2, 4), (3, 3), (1, 2)):
        moved = pools(world).run(momenta_of, settings_of("zero3", nodes), path)[0]
        assert distance(moved, expected[-1]) < 2e-5


def save_too_early(settings: dict[str, Any], path: str) -> str:
    import penstock  # noqa: PLC0415

    engine = start(settings)
    step_of(engine, 0)
    with pytest.raises(penstock.ConfigError) as refused:
        engine.save(path)
    step_of(engine, 1)
    step_of(engine, 2)
    engine.save(path)
    engine.close()
    return str(refused.value)


def test_a_save_between_outer_steps_is_refused(pools, tmp_path):
    for said in pools(4).run(save_too_early, settings_of("zero3", 2), str(tmp_path)):
        assert "each node has its own weights" in said and "in step 3" in said


def numbers_after_load(settings: dict[str, Any], path: str) -> Any:
    """Random numbers of this rank after a load, and the weights after an outer step that only the
    momentum can move, if the load left it alone."""
    engine = start(settings)
    engine.load(path)
    drawn = torch.rand(4).tolist()
    before = gathered(engine)
    engine.load(path, weights_only=True)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(EVERY):
        step_of(engine, step)
    moved = distance(gathered(engine), before)
    engine.close()
    return drawn, moved


def test_generators_and_momenta_after_a_load(pools, tmp_path):
    path = str(tmp_path)
    pools(4).run(save_and_go_on, settings_of("zero2", 2), path, 0)
    found = pools(4).run(numbers_after_load, settings_of("zero3", 2), path)
    assert len({tuple(drawn) for drawn, _ in found}) == 4
    assert all(moved > 1e-3 for _, moved in found)


# ---- what else a loop does


def other_calls(settings: dict[str, Any]) -> Any:
    engine = start(settings)
    with engine.gathered(write=True):
        for param in engine.module.parameters():
            param.data.fill_(float(dist.get_rank() == 0 or dist.get_rank() == 2) / 4)
    written = gathered(engine)
    mean = penstock_mean(engine, float(dist.get_rank()))
    for step in range(EVERY):
        step_of(engine, step)
    joined = gathered(engine)
    told = engine.ledger(), engine.metrics["comm_bytes"]
    engine.close()
    return written, joined, mean, told


def penstock_mean(engine: Any, value: float) -> float:
    mean: float = engine._core.mean(value, True)
    return mean


def test_what_users_write_is_part_of_the_anchors(pools):
    found = pools(4).run(other_calls, settings_of("zero2", 2))
    for written, joined, mean, (ledger, sent) in found:
        assert mean == 1.5
        assert all(float(one.min()) == 0.25 for one in written.values())
        # Outer steps move weights about as far as inner steps do, not by what was written.
        assert distance(joined, written) < 0.2
        assert distance(joined, found[0][1]) == 0
        measured, predicted = ledger["measured"], ledger["predicted"]["zero2"]
        assert 0.9 < measured["optim"] / predicted["optim"] < 1.1
        # A node sends 8 bytes per element of a rank in each step, and an outer step sends 4 more.
        numel = sum(one.numel() for one in joined.values()) / 2
        assert sent > 11 * numel


def in_pipeline(settings: dict[str, Any], steps: int, path: str = "", load: bool = False) -> Any:
    engine = start(settings)
    seen = []
    for step in range(steps):
        engine.train_batch(samples(step, engine.data_rank), lambda out, x: loss_of_output(out, x))
        seen.append(gathered(engine))
    if load:
        engine.load(path)
        seen.append(gathered(engine))
    elif path:
        engine.save(path)
    engine.close()
    return seen


def loss_of_output(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (out - x[:, :5]).float().square().mean()


MESHES: dict[str, tuple[int, int, dict[str, int], dict[str, Any]]] = {
    "tensor": (
        4,
        2,
        {"tensor": 2},
        {"parallel": {"rules": {"blocks.*.one": "column", "blocks.*.two": "row"}}},
    ),
    "pipeline": (4, 2, {"pipeline": 2}, {"batch": {"accumulate": 2}}),
    "stages": (8, 2, {"pipeline": 2}, {"batch": {"accumulate": 2}}),
}


@pytest.mark.parametrize("case", MESHES)
def test_nodes_of_model_ranks(case, pools):
    world, nodes, mesh, more = MESHES[case]
    settings = settings_of("zero1", nodes, mesh=mesh, **more)
    copies = world // nodes // mesh.get("tensor", 1) // mesh.get("pipeline", 1)
    expected = reference(nodes, copies)
    if "pipeline" in mesh:
        found = pools(world).run(in_pipeline, settings, STEPS)
    else:
        found = [seen for seen, _ in pools(world).run(train, settings, STEPS)]
    per_stage = world // mesh.get("pipeline", 1) // nodes
    for rank, seen in enumerate(found):
        own = expected[rank // per_stage % nodes]
        for step in range(STEPS):
            assert distance(seen[step], own[step]) < 2e-5, f"rank {rank}, step {step + 1}"


def later_writes(settings: dict[str, Any]) -> Any:
    """Weights that are written after an outer step, and those after the next one."""
    engine = start(settings)
    for step in range(EVERY):
        step_of(engine, step)
    with engine.gathered(write=True):
        for param in engine.module.parameters():
            param.data.fill_(0.25)
    for step in range(EVERY, 2 * EVERY):
        step_of(engine, step)
    found = gathered(engine)
    engine.close()
    return found


def test_later_writes_are_part_of_the_anchors(pools):
    for found in pools(4).run(later_writes, settings_of("zero2", 2)):
        assert all(float((one - 0.25).abs().max()) < 0.2 for one in found.values())


def built_in_shards(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    with penstock.init():
        model = Net()
    engine = penstock.initialize(model, copy.deepcopy(settings))
    for step in range(EVERY):
        step_of(engine, step)
    found = gathered(engine)
    engine.close()
    return found


def test_a_model_that_was_built_in_shards(pools):
    expected = reference(2, 2, EVERY)[0][-1]
    for found in pools(4).run(built_in_shards, settings_of("zero2", 2)):
        assert distance(found, expected) < 2e-5
