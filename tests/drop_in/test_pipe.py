"""DeepSpeed's pipelines: losses and weights of plain torch in one process."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import pipe_models as pipes
import pytest
import torch
from pipe_models import MICRO

pytestmark = pytest.mark.timeout(480)
STEPS, LIMIT = 3, 1e-5
MEASURES = ("losses", "evaluated", "weights", "closed", "buffers")


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        float((a.cpu() - b).detach().norm() / b.detach().norm().clamp_min(1e-12))
        for a, b in zip(ours, theirs, strict=True)
    )


def names_of(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.whole.named_parameters()]


def initial_of(model: Any) -> list[torch.Tensor]:
    return [one.detach().cpu().clone() for one in model.whole.parameters()]


def trained(kind: str, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """On a rank: how far losses, a loss of eval_batch() and weights are from plain torch."""
    model = pipes.built(kind, **options)
    names, initial = names_of(model), initial_of(model)
    engine = pipes.deepspeed().initialize(model=model, config=pipes.config_of(**config))[0]
    micro = engine.gradient_accumulation_steps()
    data = engine.dp_world_size
    rank = engine.grid.get_data_parallel_rank()
    losses = []
    for step in range(STEPS):
        needed = engine.is_first_stage() or engine.is_last_stage()
        given = pipes.batches(kind, step, rank, micro) if needed else None
        loss = engine.train_batch(data_iter=given)
        assert loss.device == torch.device(engine.device)
        losses.append(float(loss))
    evaluated = float(engine.eval_batch(pipes.batches(kind, 9, rank, micro)))
    weights = engine.native.state_dict(rank0_only=False)
    counts = [engine.global_steps, engine.micro_steps, engine.global_samples, model.parts]
    assert engine.train_batch_size() == pipes.ROWS * micro * data
    engine.destroy()
    buffers = [one for one in model.whole.buffers() if one.is_floating_point()]
    plain = pipes.plain_training(kind, initial, STEPS, data, micro)
    return {
        "losses": far([torch.tensor(losses)], [torch.tensor(plain["losses"])]),
        "evaluated": abs(evaluated - plain["evaluated"]),
        "weights": far([weights[name] for name in names], plain["weights"]),
        "closed": far(list(model.whole.parameters()), plain["weights"]),
        "buffers": far([*buffers, torch.ones(1)], [*plain["buffers"], torch.ones(1)]),
        "counts": counts,
        "moved": far(plain["weights"], initial),
        "device": str(engine.device),
    }


def near(told: list[dict[str, Any]]) -> None:
    for one in told:
        wrong = {name: one[name] for name in MEASURES if not one[name] < LIMIT}
        assert not wrong, wrong
        assert one["moved"] > 1e-3, one


@pytest.mark.parametrize(
    "kind", ["modules", "specs", "tied", "tuples", "functions", "loss", "odd", "values"]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_stages(stage, kind, drop_in_pools):
    told = drop_in_pools(2).run(trained, kind, {"num_stages": 2}, {"stage": stage})
    near(told)
    assert told[0]["counts"][:3] == [STEPS, STEPS * MICRO, STEPS * MICRO * pipes.ROWS]


@pytest.mark.parametrize("kind", ["modules", "tied", "tuples", "values"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_with_data_ranks(stages, stage, kind, drop_in_pools):
    near(drop_in_pools(4).run(trained, kind, {"num_stages": stages}, {"stage": stage}))


METHODS = [
    ("modules", "parameters"),
    ("modules", "uniform"),
    ("modules", "type:block"),
    ("tied", "type:embedding|block"),
    ("functions", "uniform"),
    ("functions", "type:linear"),
    ("specs", "type:norm|linear"),
]


@pytest.mark.parametrize(("kind", "method"), METHODS, ids=str)
@pytest.mark.parametrize("stages", [2, 3])
def test_partition_methods(stages, kind, method, drop_in_pools):
    options = {"num_stages": stages, "partition_method": method}
    told = drop_in_pools(stages).run(trained, kind, options, {"stage": 1})
    near(told)
    assert told[0]["counts"] == told[-1]["counts"]


SETTINGS = [
    ("tied", {"activation_checkpoint_interval": 1}, {}),
    ("tuples", {"activation_checkpoint_interval": 2}, {}),
    ("modules", {}, {"pipeline": {"stages": "auto", "activation_checkpoint_interval": 1}}),
    ("modules", {}, {"penstock": {"parallel": {"schedule": "interleaved", "virtual_stages": 2}}}),
    ("tied", {}, {"penstock": {"parallel": {"schedule": "gpipe"}}}),
    ("tied", {}, {"gradient_accumulation_steps": 1}),
    ("tied", {}, {"gradient_accumulation_steps": 3}),
    ("modules", {}, {"pipeline": {"stages": 4, "partition": "uniform", "seed_layers": True}}),
    ("seeded", {"seed_layers": True, "base_seed": 7, "dynamic_shape": True}, {}),
    ("seeded", {"seed_layers": True, "base_seed": 7, "activation_checkpoint_interval": 1}, {}),
]


@pytest.mark.parametrize(("kind", "options", "config"), SETTINGS, ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_settings(stage, kind, options, config, drop_in_pools):
    near(
        drop_in_pools(2).run(trained, kind, {"num_stages": 2} | options, {"stage": stage} | config)
    )


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload(stage, device, drop_in_pools, tmp_path):
    offload = {"device": device, "nvme_path": str(tmp_path)}
    zero = {"stage": stage, "offload_optimizer": offload}
    if stage == 3:
        zero["offload_param"] = offload
    config = {"zero_optimization": zero}
    near(drop_in_pools(2).run(trained, "modules", {"num_stages": 2}, config))


def precise(stage: int, section: dict[str, Any]) -> list[float]:
    """Losses in low precision, and in fp32."""
    losses = []
    for changes in (section, {}):
        model = pipes.built("tied", num_stages=2)
        config = pipes.config_of(stage, **changes)
        engine = pipes.deepspeed().initialize(model=model, config=config)[0]
        losses.append([float(engine.train_batch(pipes.batches("tied", i, 0))) for i in range(4)])
        assert not changes or engine.skipped_steps == 0
        engine.destroy()
    return [a - b for a, b in zip(*losses, strict=True)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "section",
    [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}],
    ids=str,
)
def test_low_precision(section, stage, drop_in_pools):
    for told in drop_in_pools(2).run(precise, stage, section):
        assert 0 < max(map(abs, told)) < 0.05, told


def given_parts(stage: int) -> dict[str, float]:
    """Built under zero.Init, with an optimizer and a scheduler of the script's."""
    ds = pipes.deepspeed()
    with ds.zero.Init(enabled=stage == 3):
        model = pipes.built("specs", num_stages=2)
    with ds.zero.GatheredParameters(list(model.whole.parameters())):
        initial = initial_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, same, _, _ = ds.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={key: one for key, one in pipes.config_of(stage).items() if key != "optimizer"},
    )
    losses = [float(engine.train_batch(pipes.batches("specs", step, 0))) for step in range(STEPS)]
    stepped = scheduler.last_epoch
    engine.destroy()
    plain = pipes.plain_training("specs", initial, STEPS, 1, MICRO)
    return {
        "losses": far([torch.tensor(losses)], [torch.tensor(plain["losses"])]),
        "weights": far(list(model.whole.parameters()), plain["weights"]),
        "stepped": stepped,
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_and_scheduler_of_the_script(stage, drop_in_pools):
    for told in drop_in_pools(2).run(given_parts, stage):
        assert told["losses"] < LIMIT and told["weights"] < LIMIT and told["stepped"] == STEPS, told


def lazily(kind: str, stage: int) -> list[list[float]]:
    """Losses of a model that was built whole, and of one whose weights wait for their engine."""
    import penstock  # noqa: PLC0415

    losses = []
    for context in (contextlib.nullcontext(), penstock.init()):
        with context:
            model = pipes.built(kind, num_stages=2)
        engine = pipes.deepspeed().initialize(model=model, config=pipes.config_of(stage))[0]
        losses.append([float(engine.train_batch(pipes.batches(kind, i, 0))) for i in range(3)])
        engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["tied", "specs"])
def test_weights_that_wait(kind, stage, drop_in_pools):
    for whole, waiting in drop_in_pools(2).run(lazily, kind, stage):
        assert whole == waiting and whole[1] != whole[0]


def counted(interval: int) -> int:
    """Forwards of a block of this rank's stage in one step."""
    calls = []

    def count(*_: Any) -> None:
        calls.append(1)

    model = pipes.built("modules", num_stages=2, activation_checkpoint_interval=interval)
    own = model.get_submodule(str(model.parts[torch.distributed.get_rank()] + 1))
    own.up.register_forward_pre_hook(count)
    engine = pipes.deepspeed().initialize(model=model, config=pipes.config_of())[0]
    engine.train_batch(pipes.batches("modules", 0, 0))
    engine.destroy()
    return len(calls)


def test_layers_are_computed_again(drop_in_pools):
    plain, again = (drop_in_pools(2).run(counted, interval) for interval in (0, 1))
    assert plain[0] == MICRO and again[0] == 2 * MICRO and again[1] == 2 * plain[1] > 0


def with_topology(axes: list[str], dims: list[int]) -> dict[str, Any]:
    ds = pipes.deepspeed()
    from deepspeed.runtime.pipe import topology  # noqa: PLC0415

    model = pipes.built("modules", topology=topology.ProcessTopology(axes, dims))
    engine = ds.initialize(model=model, config=pipes.config_of())[0]
    grid, rank = engine.grid, torch.distributed.get_rank()
    told = {
        "rank": rank,
        "engine": [engine.num_stages, engine.stage_id, engine.prev_stage, engine.next_stage],
        "ends": [engine.is_first_stage(), engine.is_last_stage()],
        "pipe": engine.is_pipe_parallel,
        "grid": [grid.get_stage_id(), grid.get_data_parallel_id(), grid.stage_to_global(1)],
        "groups": [
            torch.distributed.get_process_group_ranks(group)
            for group in (grid.get_pipe_parallel_group(), grid.get_data_parallel_group())
        ],
        "global": ds.utils.groups.get_data_parallel_world_size(),
        "native": engine.native.data_rank,
        "owner": [model.stage_owner(index) for index in range(7)],
    }
    engine.destroy()
    told["after"] = ds.utils.groups.get_data_parallel_world_size()
    return told


def test_grid(drop_in_pools):
    told = drop_in_pools(4).run(with_topology, ["pipe", "data"], [2, 2])
    for rank, one in enumerate(told):
        stage, data = divmod(rank, 2)
        assert one["engine"] == [2, stage, stage - 1, stage + 1]
        assert one["ends"] == [stage == 0, stage == 1] and one["pipe"]
        assert one["grid"] == [stage, data, 2 + data] and one["native"] == data
        assert one["groups"] == [[data, 2 + data], [2 * stage, 2 * stage + 1]]
        assert one["global"] == 2 and one["after"] == 4
        assert one["owner"] == sorted(one["owner"]) and set(one["owner"]) == {0, 1}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4 * pipes.ROWS

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randint(0, 41, (pipes.LENGTH,), generator=generator) for _ in range(2))


def with_loader() -> dict[str, Any]:
    """training_data, which begins again; then a loader of the user's, with a batch_fn."""
    ds = pipes.deepspeed()
    model = pipes.built("modules", num_stages=2)
    initial = initial_of(model)
    config = pipes.config_of(
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    )
    engine, _, loader, _ = ds.initialize(model=model, config=config, training_data=Samples())
    first = [float(engine.train_batch()) for _ in range(5)]
    rates = engine.get_lr()[0]
    rank = engine.grid.get_data_parallel_rank()
    # What a step's data is, seen by eval_batch() without a step.
    data = [[Samples()[i] for i in range(8)][rank::2][:4]]
    own = [torch.stack(column) for column in zip(*data[0], strict=True)]
    engine.set_batch_fn(lambda given: (given["ids"], given["labels"]))
    named = iter([{"ids": own[0][i : i + 2], "labels": own[1][i : i + 2]} for i in (0, 2)])
    evaluated = float(engine.eval_batch(named))
    engine.destroy()
    plain = torch.nn.Sequential(*pipes._plain_layers())
    for param, value in zip(plain.parameters(), initial, strict=True):
        param.data.copy_(value)
    with torch.no_grad():
        every = [Samples()[i] for i in range(8)]
        ids, labels = (torch.stack(column) for column in zip(*every, strict=True))
        expected = float(pipes.cross_entropy(plain(ids), labels))
    return {
        "first": first[0] - expected,
        "losses": first,
        "rate": rates,
        "evaluated": evaluated,
        "loader": type(loader).__name__,
    }


def test_loaders(drop_in_pools):
    for told in drop_in_pools(4).run(with_loader):
        assert abs(told["first"]) < LIMIT, told  # all samples, of 2 data ranks and 2 micro-batches
        assert told["losses"][4] < told["losses"][0] and told["rate"] > 0, told
        assert told["evaluated"] < told["losses"][4] and told["loader"] == "RepeatingLoader", told


def evaluates(stages: int) -> dict[str, Any]:
    model = pipes.built("modules", num_stages=stages)
    initial = initial_of(model)
    engine = pipes.deepspeed().initialize(model=model, config=pipes.config_of(3))[0]
    rank = engine.grid.get_data_parallel_rank()

    def run(micro: int = MICRO, **options: Any) -> Any:
        return engine.eval_batch(pipes.batches("modules", 9, rank, micro), **options)

    told = {
        "last": engine.is_last_stage(),
        "pair": run(return_logits=True),
        "own": run(bcast_loss=False),
        "list": run(reduce_output=None, bcast_loss=False),
        "one": run(1, num_micro_batches=1),
        "outputs": run(compute_loss=False, reduce_output=None),
        "training": engine.module.training,
    }
    told["average"] = run(compute_loss=False)
    engine.destroy()
    plain = pipes.plain_of("modules")
    for param, value in zip(plain.parameters(), initial, strict=True):
        param.data.copy_(value)
    with torch.no_grad():
        data = engine.dp_world_size
        told["loss"] = pipes.plain_loss(plain, "modules", 9, data, MICRO)
        told["first"] = pipes.plain_loss(plain, "modules", 9, data, 1)
        given = list(pipes.batches("modules", 9, rank))
        told["logits"] = [plain(inputs) for inputs, _ in given]
        every = [plain(ids) for one in range(data) for ids, _ in pipes.batches("modules", 9, one)]
        told["mean"] = torch.stack(every).mean(0)
        told["losses"] = [
            pipes.cross_entropy(made, labels)
            for made, (_, labels) in zip(told["logits"], given, strict=True)
        ]
    return told


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_eval_batch(stages, drop_in_pools):
    for told in drop_in_pools(4).run(evaluates, stages):
        close = torch.testing.assert_close
        loss, logits = told["pair"]
        close(loss, told["loss"])
        close(told["one"], told["first"])
        assert told["training"]
        if not told["last"]:
            assert logits is None and told["own"] is None
            assert told["list"] is None and told["outputs"] is None and told["average"] is None
            continue
        close(logits, told["logits"][-1])
        close(told["own"], told["loss"])
        close(told["list"], told["losses"])
        close(told["outputs"], told["logits"])
        close(told["average"], told["mean"])


def goes_on(folder: str, stages: int, other: int, zero: tuple[int, int]) -> dict[str, Any]:
    """Trains, saves, and goes on in another mesh; and without the interruption."""
    ds = pipes.deepspeed()

    def start(stages: int, stage: int) -> Any:
        model = pipes.built("tied", num_stages=stages)
        micro = 2 * stages  # 8 micro-batches over all data ranks
        config = pipes.config_of(stage, gradient_accumulation_steps=micro)
        return ds.initialize(model=model, config=config)[0]

    def step(engine: Any, index: int) -> float:
        own, first = engine.micro_batches, engine.grid.get_data_parallel_rank()
        every = list(pipes.batches("tied", index, 0, 8))
        return float(engine.train_batch(iter(every[first * own : (first + 1) * own])))

    engine = start(stages, zero[0])
    step(engine, 0)
    engine.save_checkpoint(folder, tag="one", client_state={"epoch": 3})
    kept = engine.native.state_dict(rank0_only=False)
    expected = [step(engine, index) for index in (1, 2)]
    engine.destroy()
    again = start(other, zero[1])
    path, state = again.load_checkpoint(folder, tag="one")
    loaded = again.native.state_dict(rank0_only=False)
    same = all(torch.equal(kept[name], one) for name, one in loaded.items())
    counts = [again.global_steps, again.global_samples]
    losses = [step(again, index) for index in (1, 2)]
    again.save_16bit_model(folder)
    again.destroy()
    written = torch.load(os.path.join(folder, "pytorch_model.bin"))
    exported = far([written[name] for name in names_of(again.module)], initial_of(again.module))
    return {
        "exported": exported,
        "same": same and set(kept) == set(loaded),
        "state": state,
        "path": path,
        "counts": counts,
        "far": far([torch.tensor(losses)], [torch.tensor(expected)]),
    }


@pytest.mark.parametrize(("stages", "other"), [(2, 2), (2, 4), (4, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("zero", [(1, 1), (3, 2)], ids=str)
def test_checkpoints(stages, other, zero, drop_in_pools, tmp_path):
    for told in drop_in_pools(4).run(goes_on, str(tmp_path), stages, other, zero):
        assert told["same"] and told["far"] < LIMIT and told["exported"] == 0, told
        assert told["state"] == {"epoch": 3} and told["counts"] == [1, 16], told


def places() -> list[Any]:
    """Of ranks in a topology; and a copy of a model."""
    pipes.deepspeed()
    from deepspeed.runtime.pipe import topology  # noqa: PLC0415

    topo = topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    model, rank = pipes.built("modules", num_stages=2), torch.distributed.get_rank()
    other = copy.deepcopy(model)
    ids = pipes.batch("modules", 0, 0, 0)[0]
    return [
        topo.get_axis_names(),
        [topo.get_dim(axis) for axis in ("pipe", "data", "model", "none")],
        topo.get_rank(pipe=1, data=0, model=1),
        list(topo.get_coord(6)),
        [topo.get_coord(3).pipe, topo.get_coord(3).data, topo.get_coord(3).model],
        [topo.get_rank_repr(3), topo.get_rank_repr(3, omit_axes=["data"]), topo.world_size()],
        topo.get_axis_comm_lists("pipe"),
        topo.get_axis_comm_lists("model"),
        topo.get_axis_comm_lists("none"),
        [topo.filter_match(pipe=0, data=1), topo.get_axis_list("model", 1)],
        [
            other.mpu() is model.mpu(),
            other.forward_funcs[1] is other.whole.get_submodule(str(other.parts[rank] + 1)),
        ],
        torch.equal(model(ids), other(ids))
        and other.forward_funcs[1] is not model.forward_funcs[1],
    ]


def test_topologies(drop_in_pools):
    for told in drop_in_pools(2).run(places):
        assert told == [
            ["pipe", "data", "model"],
            [2, 2, 2, 0],
            5,
            [1, 1, 0],
            [0, 1, 1],
            ["model_01", "pipe_00-model_01", 8],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [],
            [[2, 3], [1, 3, 5, 7]],
            [True, True],
            True,
        ]
