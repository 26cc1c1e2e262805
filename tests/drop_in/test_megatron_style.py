"""Models whose layers cut their own parameters over the tensor ranks of an mpu, or over the axis
"model" of a pipeline's topology, train as in one process, with the same dropout."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import megatron_models as megatron
import pytest
import torch
import torch.distributed as dist
from pipe_models import deepspeed
from ranks import Failure
from torch import nn

pytestmark = pytest.mark.timeout(480)
STEPS, MICRO, LIMIT = 3, 4, 1e-5


def _far(ours: dict[str, torch.Tensor], theirs: nn.Module) -> float:
    values = dict(theirs.named_parameters())
    return max(float((ours[name] - one).detach().abs().max()) for name, one in values.items())


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


# ---- the mpu


def plain(tensor: int, data: int) -> dict[str, Any]:
    """One process: each data rank has its own random numbers."""
    torch.manual_seed(3)
    place = megatron.Place()
    model = megatron.Net(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    streams = [megatron.Streams(megatron.SEED, tensor) for _ in range(data)]
    torch.manual_seed(megatron.SEED)
    states = [torch.get_rng_state()] * data
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data):
            torch.set_rng_state(states[rank])
            place.streams = streams[rank]
            ids, labels = megatron.batch(step, rank)
            loss = megatron.loss_of(model(ids), labels) / data
            states[rank] = torch.get_rng_state()
            loss.backward()
            losses.append(float(loss.detach()) * data)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "model": model}


def trained(stage: int, recompute: str, changes: dict[str, Any]) -> dict[str, Any]:
    """On a rank: how far losses, norms and weights are from those of one process."""
    ds, mpu = deepspeed(), megatron.Mpu(2)
    checkpointing = ds.checkpointing
    function = {"": None, "reentrant": checkpointing.checkpoint}.get(
        recompute, checkpointing.non_reentrant_checkpoint
    )
    torch.manual_seed(3)
    place = megatron.Place(mpu.get_model_parallel_group(), megatron.Tracked())
    model = megatron.Net(place, function)
    shapes = [one.shape for one in model.parameters()]
    checkpointing.configure(mpu)
    checkpointing.model_parallel_cuda_manual_seed(megatron.SEED)
    engine = ds.initialize(model=model, mpu=mpu, config=megatron.config_of(stage, **changes))[0]
    rank, losses, norms = mpu.get_data_parallel_rank(), [], []
    for step in range(STEPS):
        ids, labels = megatron.batch(step, rank)
        loss = megatron.loss_of(engine(ids), labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    weights = engine.native.state_dict(rank0_only=False)
    groups = ds.utils.groups
    sizes = [engine.dp_world_size, engine.mp_world_size, groups.get_model_parallel_rank()]
    engine.destroy()
    data = mpu.get_data_parallel_world_size()
    theirs = plain(2, data)
    again = megatron.Net(place)  # this rank's parts of the final weights
    for (_, own), (name, part) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        whole = weights[name]
        dim, stride = getattr(part, "partition_dim", 0), getattr(part, "partition_stride", 1)
        if whole.shape != part.shape:
            blocks = whole.unflatten(dim, (stride, 2, -1)).select(dim + 1, place.rank)
            whole = blocks.flatten(dim, dim + 1)
        assert torch.equal(own.detach(), whole), name
    return {
        "losses": _apart(losses, theirs["losses"][rank::data]),
        "norms": _apart(norms, theirs["norms"]),
        "weights": _far(weights, theirs["model"]),
        "sizes": sizes,
        "given back": [one.shape for one in model.parameters()] == shapes,
    }


MPU_CASES = [
    (0, "", {}),
    (0, "reentrant", {}),
    (1, "non-reentrant", {}),
    (2, "reentrant", {}),
    (3, "non-reentrant", {}),
    (2, "", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("stage", "recompute", "changes"), MPU_CASES, ids=str)
def test_mpu_trains_as_one_process(stage, recompute, changes, ranks, drop_in_pools):
    for index, one in enumerate(drop_in_pools(ranks).run(trained, stage, recompute, changes)):
        for measure in ("losses", "norms", "weights"):
            assert one[measure] < LIMIT, one
        assert one["sizes"] == [ranks // 2, 2, index % 2] and one["given back"], one


def saved(stage: int) -> dict[str, Any]:
    """On a rank: a checkpoint continues with another stage, and in an uncut model."""
    ds, mpu, folder = deepspeed(), megatron.Mpu(2), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    place = megatron.Place(mpu.get_model_parallel_group(), megatron.Tracked())
    ds.checkpointing.configure(mpu)
    ds.checkpointing.model_parallel_cuda_manual_seed(megatron.SEED)
    torch.manual_seed(3)
    model = megatron.Net(place)
    first = ds.initialize(model=model, mpu=mpu, config=megatron.config_of(stage))[0]
    ids, labels = megatron.batch(0, 0)
    first.backward(megatron.loss_of(first(ids), labels))
    first.step()
    first.save_checkpoint(folder[0])
    weights = first.native.state_dict(rank0_only=False)
    # The second call ends the first engine; the model has its parts again.
    second = ds.initialize(model=model, mpu=mpu, config=megatron.config_of(3 - stage))[0]
    again = second.native.state_dict(rank0_only=False)
    path, _ = second.load_checkpoint(folder[0])
    second.destroy()
    uncut = ds.initialize(model=megatron.Net(megatron.Place()), config=megatron.config_of(3))[0]
    uncut.load_checkpoint(folder[0])
    found = uncut.native.state_dict(rank0_only=False)
    uncut.destroy()
    return {
        "again": all(torch.equal(again[name], weights[name]) for name in weights),
        "uncut": all(torch.equal(found[name], weights[name]) for name in weights),
        "path": bool(path),
        "steps": uncut.global_steps,
    }


@pytest.mark.parametrize("stage", [0, 2])
def test_checkpoints_of_an_mpu(stage, drop_in_pools):
    expected = {"again": True, "uncut": True, "path": True, "steps": 1}
    assert drop_in_pools(2).run(saved, stage) == [expected] * 2


def refused(name: str) -> None:
    ds = deepspeed()
    mpu = megatron.Mpu(2, apart=name == "apart")
    place = megatron.Place(mpu.get_model_parallel_group(), megatron.Tracked())
    config = megatron.config_of(1)
    torch.manual_seed(3)
    model = megatron.Net(place, mark="" if name == "mark" else "model_parallel")
    if name == "replicated":
        model.norm.bias.data.fill_(float(dist.get_rank()))
    if name == "buffer":
        model.register_buffer("first", torch.tensor(float(dist.get_rank())))
    if name == "dim":
        model.blocks[0].up_bias.partition_dim = 1
    if name == "config":
        config["tensor_parallel"] = {"autotp_size": 2}
    if name == "rules":
        config["penstock"]["parallel"] = {"rules": {"norm": "whole"}}
    if name == "group":
        mpu.get_model_parallel_group = None
    if name == "stages":
        mpu.get_pipe_parallel_world_size = lambda: 2
    if name == "meta":
        with torch.device("meta"):
            model = megatron.Net(megatron.Place())
    engine = ds.initialize(model=model, mpu=mpu, config=config)[0]
    if name == "gradient":  # a parameter that needs a sum over tensor ranks
        bias = model.blocks[0].down_bias
        ids, labels = megatron.batch(0, 0)
        loss = megatron.loss_of(engine(ids), labels)
        engine.backward(loss + bias.sum() * dist.get_rank())
        try:
            engine.step()
        finally:
            engine.native.close(gather=False)


REFUSED = {
    "mark": "set param.model_parallel = True",
    "replicated": '"norm.bias" differs between tensor ranks',
    "buffer": '"first" differs between tensor ranks',
    "dim": "partition_dim 1",
    "config": "must cut its own layers",
    "rules": "must cut its own layers",
    "group": "lacks the method get_model_parallel_group()",
    "stages": "use a deepspeed.pipe.PipelineModule",
    "meta": "has no values",
    "gradient": "blocks.0.down_bias",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, drop_in_pools):
    for failed in drop_in_pools(2).attempt(refused, name):
        assert isinstance(failed, Failure), failed
        assert REFUSED[name] in failed.text, failed.text


def test_tensor_ranks_are_neighbours(drop_in_pools):
    for failed in drop_in_pools(4).attempt(refused, "apart"):
        assert "Tensor ranks must be neighbours" in failed.text, failed


# ---- the pipeline


def specs(place: megatron.Place) -> list[Any]:
    pipe = deepspeed().pipe
    tied = partial(
        pipe.TiedLayerSpec,
        "embed",
        megatron.VocabEmbedding,
        place,
        tied_weight_attr=["word_embeddings_weight"],
    )
    return [
        tied(),
        lambda x: x * 1.5,
        *(pipe.LayerSpec(megatron.Block, place, 0.0) for _ in range(4)),
        pipe.LayerSpec(nn.LayerNorm, megatron.WIDTH),
        tied(forward_fn=megatron.logits_of),
    ]


class Plain(nn.Module):
    """The same in one process. `streams`: the random numbers of each stage."""

    def __init__(self, place: megatron.Place, bounds: list[int], streams: list[Any]) -> None:
        super().__init__()
        self.embedding = megatron.VocabEmbedding(place)
        self.blocks = nn.ModuleList(megatron.Block(place, 0.0) for _ in range(4))
        self.norm = nn.LayerNorm(megatron.WIDTH)
        self._place, self._bounds, self._streams = place, bounds, streams

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * 1.5
        for index, block in enumerate(self.blocks, 2):
            stage = sum(index >= bound for bound in self._bounds[1:-1])
            self._place.streams = self._streams[stage]
            x = block(x)
        return megatron.logits_of(self.embedding, self.norm(x))


def plain_pipeline(tensor: int, data: int, bounds: list[int]) -> dict[str, Any]:
    torch.manual_seed(5)
    place = megatron.Place()
    stages = range(len(bounds) - 1)
    streams = [
        [megatron.Streams(megatron.SEED + 100 * stage, tensor) for stage in stages]
        for _ in range(data)
    ]
    model = Plain(place, bounds, streams[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []

    def total(step: int) -> torch.Tensor:
        made = torch.zeros(())
        for rank in range(data):
            model._streams = streams[rank]
            for micro in range(MICRO):
                ids, labels = megatron.batch(step, rank, micro)
                made = made + megatron.loss_of(model(ids), labels) / (data * MICRO)
        return made

    for step in range(STEPS):
        optimizer.zero_grad()
        loss = total(step)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return {"losses": losses, "norm": norm, "evaluated": float(total(9)), "model": model}


NAMES = {"embedding.weight": "0.weight", "norm.weight": "6.weight", "norm.bias": "6.bias"}


def piped(
    places: tuple[int, int, int], stage: int, options: dict[str, Any], sent: bool = False
) -> dict[str, Any]:
    """On a rank: a pipeline with tensor ranks. `sent`: only one tensor rank has the data."""
    ds = deepspeed()
    from deepspeed.runtime.pipe.topology import (  # noqa: PLC0415
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    stages, tensor, data = places
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    mpu = PipelineParallelGrid(topology)  # the script's own groups
    group = mpu.get_model_parallel_group()
    place = megatron.Place(group if tensor > 1 else None, megatron.Tracked())
    ds.checkpointing.configure(mpu)
    torch.manual_seed(5)
    model = ds.pipe.PipelineModule(
        specs(place), topology=topology, loss_fn=megatron.loss_of,
        partition_method="type:block", **options,
    )  # fmt: skip
    ds.checkpointing.model_parallel_cuda_manual_seed(
        megatron.SEED + 100 * mpu.get_pipe_parallel_rank()
    )
    config = megatron.config_of(stage, gradient_accumulation_steps=MICRO)
    engine = ds.initialize(model=model, config=config)[0]
    rank = engine.grid.get_data_parallel_rank()
    first = sent and mpu.get_model_parallel_rank() == 0

    def received(given: Any) -> Any:
        both = torch.stack(given if first else megatron.batch(0, 0))
        dist.broadcast(both, dist.get_process_group_ranks(group)[0], group=group)
        return both[0], both[1]

    def data_of(step: int) -> Any:
        inner = not (engine.is_first_stage() or engine.is_last_stage())
        if inner or (sent and not first):
            return None
        return iter([megatron.batch(step, rank, micro) for micro in range(MICRO)])

    if sent:
        engine.set_batch_fn(received)
    losses = [float(engine.train_batch(data_iter=data_of(step))) for step in range(STEPS)]
    norm = engine.get_global_grad_norm()
    evaluated = float(engine.eval_batch(data_of(9)))
    weights = engine.native.state_dict(rank0_only=False)
    told = [engine.is_model_parallel, engine.mp_world_size, engine.dp_world_size]
    shape = [*model.whole.tied["embed"].weight.shape]
    engine.destroy()
    theirs = plain_pipeline(tensor, data, model.parts)
    ours = {name: weights[other] for name, other in _names(model).items()}
    return {
        "losses": _apart(losses, theirs["losses"]),
        "norm": abs(norm - theirs["norm"]) / theirs["norm"],
        "evaluated": abs(evaluated - theirs["evaluated"]),
        "weights": _far(ours, theirs["model"]),
        "told": told,
        "shape": shape,
    }


def _names(model: Any) -> dict[str, str]:
    """The names of parameters in the pipeline, by their names in the model of one process."""
    names = dict(NAMES)
    for index in range(4):
        for name, _ in model.whole.get_submodule(str(index + 2)).named_parameters():
            names[f"blocks.{index}.{name}"] = f"{index + 2}.{name}"
    return names


EVERY = {"activation_checkpoint_interval": 1}
SOME = EVERY | {"checkpointable_layers": ["Block"]}
PIPED = [
    ((2, 1, 1), 1, EVERY),
    ((1, 2, 1), 1, SOME),
    ((2, 2, 1), 0, {}),
    ((2, 2, 1), 1, SOME),
    ((2, 2, 1), 3, SOME | {"activation_checkpoint_interval": 2}),
    ((1, 2, 2), 2, EVERY),
    ((2, 1, 2), 1, SOME),
]


@pytest.mark.parametrize(("places", "stage", "options"), PIPED, ids=str)
def test_pipelines_train_as_one_process(places, stage, options, drop_in_pools):
    ranks = places[0] * places[1] * places[2]
    for one in drop_in_pools(ranks).run(piped, places, stage, options):
        for measure in ("losses", "norm", "evaluated", "weights"):
            assert one[measure] < LIMIT, one
        assert one["told"] == [places[1] > 1, places[1], places[2]], one
        assert one["shape"] == [megatron.VOCAB // places[1], megatron.WIDTH], one


def test_data_of_one_tensor_rank(drop_in_pools):
    for one in drop_in_pools(4).run(piped, (2, 2, 1), 1, {}, True):
        assert one["losses"] < LIMIT and one["weights"] < LIMIT, one


# ---- the tracker


def tracked() -> dict[str, Any]:
    """On a rank: what a layer draws on tensor ranks, and again in a recomputation."""
    ds, mpu = deepspeed(), megatron.Mpu(2)
    checkpointing = ds.checkpointing
    checkpointing.configure(mpu, partition_activations=False)
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()

    def drawn() -> list[float]:
        with tracker.fork():
            return torch.rand(2).tolist()

    outside, first = torch.rand(2).tolist(), drawn()
    after = drawn()
    checkpointing.model_parallel_reconfigure_tp_seed(7)
    again = drawn()
    masks: list[torch.Tensor] = []

    def layer(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        with tracker.fork():
            mask = torch.rand(3)
        masks.append(mask)
        return (x * mask * (1.0 if scale is None else scale),)

    x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    for call in (
        lambda: checkpointing.checkpoint(layer, x, scale=scale),
        lambda: checkpointing.non_reentrant_checkpoint(layer, x, scale),
    ):
        call().sum().backward()
    told = []
    for change in (lambda: tracker.add("other", 7 + 2718 + mpu.get_model_parallel_rank()),
                   lambda: tracker.add("model-parallel-rng", 3)):  # fmt: skip
        try:
            change()
        except ValueError as error:
            told.append(str(error))
    return {
        "outside": outside,
        "first": first,
        "after": after,
        "again": again,
        "masks": [one.tolist() for one in masks],
        "grads": [x.grad.tolist(), scale.grad.tolist()],
        "told": told,
    }


def test_tracker(drop_in_pools):
    one, two = drop_in_pools(2).run(tracked)
    assert one["outside"] == two["outside"] and one["first"] != two["first"]
    for told in (one, two):
        assert told["again"] == told["first"] != told["after"]
        masks = torch.tensor(told["masks"])
        assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
        assert not torch.equal(masks[0], masks[2])
        total = masks[0] + masks[2]
        assert torch.equal(torch.tensor(told["grads"][0]), 2 * total)
        assert torch.equal(torch.tensor(told["grads"][1]), total)
        assert len(told["told"]) == 2 and all("reset()" in text for text in told["told"])
