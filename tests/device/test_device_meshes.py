"""Tensor, sequence and pipeline ranks on an accelerator: their steps are those of plain torch in
one process on the CPU, and replicas are equal to the last bit.

`pytest tests/device/test_device_meshes.py --full` runs every third case of tests/parity/meshes.py;
without it a sample runs, in which every mesh and kind of step occurs (of expert ranks: some).
"""

from __future__ import annotations

import meshes
import on_device
import pipeline_models
import pytest
import sim
import test_meshes
import torch
import torch.distributed as dist
import training

pytestmark = pytest.mark.timeout(480)
# By full: the first case and the stride.
STEPS = 4
CHOSEN = {True: (1, 3), False: (77, 87)}


def chosen(full: bool) -> list[meshes.Case]:
    first, stride = CHOSEN[full]
    found = meshes.all_cases()[first::stride] + meshes.expert_cases()[1 :: 3 if full else 79]
    cases = [one for one in found if one.world <= on_device.count()]
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


def test_groups_of_sequence_ranks(device_pools, tmp_path, largest):
    """Two groups of two neighbours, each with communicators of its own."""
    case = meshes.Case((("sequence", 4),), "zero3", "llama", "two", "auto")
    told = device_pools(case.world).run(run, case, str(tmp_path), 1, timeout=200)
    test_meshes.check(told, largest)


def test_enough_cases_and_the_sample_has_all():
    if on_device.NAME != "sim":
        return
    assert len(chosen(True)) >= 300
    test_meshes.check_has_all(chosen(False), ("mesh", "steps"))


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


def late(case, pools, path, largest, delays_us=(400, 0)):
    if on_device.NAME != "sim":
        pytest.skip("needs a device that is late on purpose")
    for seed in range(2):
        told = pools(2).run(run_late, case, str(path), seed, *delays_us, timeout=200)
        test_meshes.check(told, largest)


def two(axis, *kinds):
    """Two ranks that meet on the device."""
    return meshes.Case(((axis, 2),), *kinds, "auto")


HOST_SUMS = [
    two("tensor", "zero1 host", "mlp", "one"),  # nothing is summed, but gradients are compared
    two("tensor", "zero1 host", "llama", "one"),
    two("tensor", "zero2 disk", "llama", "one"),
    two("pipeline", "zero1 host", "llama tied", "one"),
    two("pipeline", "zero2", "llama tied", "one"),
]


@pytest.mark.parametrize("sums", HOST_SUMS, ids=lambda case: case.name)
def test_gradients_on_the_host_arrive_before_model_ranks_use_them(
    sums, device_pools, tmp_path, largest
):
    late(sums, device_pools, tmp_path, largest)


@pytest.mark.parametrize("steps", ["eight", "three"])
def test_memory_of_messages_is_kept_while_it_is_used(steps, device_pools, tmp_path, largest):
    late(two("pipeline", "zero1", "mlp", steps), device_pools, tmp_path, largest)


@pytest.mark.parametrize("strategy", ["zero3", "zero3 host"])
def test_model_ranks_take_turns_with_the_lanes(strategy, device_pools, tmp_path, largest):
    """Ranks launch up to 20 ms apart, on communicators of the lanes and of the sequence axis."""
    late(two("sequence", strategy, "llama", "two"), device_pools, tmp_path, largest, (100, 20000))


@pytest.mark.parametrize("model", ["mlp", "llama", "gpt2"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "zero3 host"])
def test_split_backwards(strategy, model, device_pools, tmp_path, largest):
    case = two("pipeline", strategy, model, "zero bubble")
    told = device_pools(2).run(run, case, str(tmp_path), 2, timeout=200)
    test_meshes.check(told, largest)


@pytest.mark.parametrize("steps", ["interleaved", "zero bubble", "eight"])
def test_stages_launch_messages_in_one_order(steps, device_pools, tmp_path, largest):
    """Ranks launch up to 20 ms apart, with messages under way in both directions."""
    late(two("pipeline", "zero1", "mlp", steps), device_pools, tmp_path, largest, (100, 20000))


# ---- the life of an engine


def started(axis, **options):
    """An engine of a chain on this rank's device, and its plain twin on the CPU."""
    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    model = training.moved(meshes.chain(**options), on_device.device())
    case = two(axis, "zero1", "mlp", "two")
    return penstock.initialize(model, case.config("") | {"clip": 0.0}), meshes.chain(**options)


def there(step=0, rank=0):
    parts = pipeline_models.parts(pipeline_models.batch(step, rank, 2), 2)
    return iter([{n: one.to(on_device.device()) for n, one in part.items()} for part in parts])


def lives(axis, path):
    engine, twin = started(axis, tied=True)
    model, rank = engine.module, dist.get_rank()
    parts = pipeline_models.parts(pipeline_models.batch(0, 0, 2), 2)
    expected = sum(float(twin(**part)) for part in parts) / 2
    assert abs(float(engine.eval_batch(there())) - expected) < 1e-5
    engine.train_batch(there())
    before = {name: one.clone() for name, one in engine.state_dict(rank0_only=False).items()}
    with engine.gathered():
        assert all(
            torch.equal(one.detach().cpu(), before[n]) for n, one in model.named_parameters()
        )
    with engine.gathered(), engine.gathered(write=True):
        if rank == 0:
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
                model.blocks[3].down.weight.mul_(2)
        doubled = engine.state_dict(rank0_only=False)
    for name, one in engine.state_dict(rank0_only=False).items():
        wanted = before[name] * (2 if name in ("blocks.0.up.weight", "blocks.3.down.weight") else 1)
        assert torch.equal(one, wanted) and torch.equal(doubled[name], wanted), name
    engine.save(path)
    engine.train_batch(there(1))
    after = {name: one.clone() for name, one in engine.state_dict(rank0_only=False).items()}
    engine.load(path)
    engine.train_batch(there(1))
    assert all(
        torch.equal(one, after[name]) for name, one in engine.state_dict(rank0_only=False).items()
    )
    engine.close()
    return {name: one.detach().cpu() for name, one in model.named_parameters()}


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_life(axis, device_pools, tmp_path):
    first, second = device_pools(2).run(lives, axis, str(tmp_path))
    assert all(torch.equal(one, second[name]) for name, one in first.items())


def other_batches(axis):
    engine, _ = started(axis)
    try:
        engine.train_batch(there(0, dist.get_rank()))
        return "nothing"
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close(gather=False)


@pytest.mark.parametrize(
    ("axis", "text"), [("tensor", "given different inputs"), ("pipeline", "different batches")]
)
def test_other_batches_are_noticed(axis, text, device_pools):
    assert any(text in said for said in device_pools(2).run(other_batches, axis))


def trains_tied():
    """Stages 0 and 1 share a layer that trains, stages 0 and 2 a frozen one."""
    import penstock  # noqa: PLC0415

    def build():
        model = pipeline_models.build(layers=3, tied=True)
        model.tokens.weight.requires_grad_(False)
        model.blocks[1].up.weight = model.blocks[0].up.weight
        return model

    on_device.schedule(0)
    model, twin = training.moved(build(), on_device.device()), build()
    config = {"strategy": "zero1", "mesh": {"pipeline": 3}, "units": {"layer_bytes": 1}}
    config |= {"optimizer": {"type": "SGD", "lr": 0.1}, "batch": {"accumulate": 2}}
    config |= {"parallel": {"schedule": "gpipe"}, "comm": {"timeout_s": 120}}
    engine = penstock.initialize(model, config)
    optimizer = torch.optim.SGD([one for one in twin.parameters() if one.requires_grad], lr=0.1)
    for step in range(3):
        engine.train_batch(there(step))
        for part in pipeline_models.parts(pipeline_models.batch(step, 0, 2), 2):
            (twin(**part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    theirs = dict(twin.named_parameters())
    return max(float((one.cpu() - theirs[n]).abs().max()) for n, one in model.named_parameters())


def test_weights_that_stages_share(device_pools):
    assert max(device_pools(3).run(trains_tied)) < 1e-5
