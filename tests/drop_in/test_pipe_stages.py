"""A PipelineModule lists the layers of its rank's stage, and each stage sets up its layers."""

from __future__ import annotations

import re
from typing import Any

import pipe_models as pipes
import pytest
import torch
import torch.distributed as dist
from pipe_models import VOCAB, WIDTH
from raised import raised
from torch import nn

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-6


def stage() -> int:
    return torch.distributed.get_rank()


def listed() -> dict[str, Any]:
    """Names that a module with tied layers, functions and buffers lists on this rank."""
    tied = ("tok", nn.Embedding, VOCAB, WIDTH)
    pipe = pipes.deepspeed().pipe
    model = pipe.PipelineModule(
        [
            pipe.TiedLayerSpec(*tied),
            nn.Linear(WIDTH, WIDTH),
            pipe.LayerSpec(nn.Linear, WIDTH, WIDTH),
            torch.relu,
            nn.BatchNorm1d(pipes.LENGTH),
            pipe.TiedLayerSpec(*tied, forward_fn=pipes.as_head),
        ],
        num_stages=2,
        loss_fn=pipes.cross_entropy,
    )
    every = {"dtype": {one.dtype for one in model.half().whole.parameters()}}
    model.float().eval()
    every["training"] = {one.training for one in model.whole.modules()}
    return every | {
        "parameters": [name for name, _ in model.named_parameters()],
        "modules": [name for name, _ in model.named_modules()],
        "state": sorted(model.state_dict()),
        "layers": len(model.forward_funcs),
        "all": len(list(model.whole.parameters())),
    }


def test_names_are_those_of_deepspeed(drop_in_pools):
    norm = ["num_batches_tracked", "running_mean", "running_var"]
    first, last = drop_in_pools(2).run(listed)
    own = ["tied_modules.tok.weight", "1.weight", "1.bias"]
    assert first["parameters"] == own and first["state"] == sorted(own)
    assert first["modules"] == ["", "tied_modules", "tied_modules.tok", "1"]
    own = ["tied_modules.tok.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert last["parameters"] == own
    assert last["state"] == sorted(own + [f"4.{name}" for name in norm])
    assert last["modules"] == ["", "tied_modules", "tied_modules.tok", "2", "4"]
    assert (first["layers"], last["layers"]) == (2, 4)
    for told in (first, last):
        assert told["dtype"] == {torch.float16} and told["training"] == {False} and told["all"] == 7


def by_owner(given: str, zero: int) -> dict[str, float]:
    """Values, frozen parameters and groups that each stage sets for its own layers only."""
    ds = pipes.deepspeed()
    model = pipes.built("modules", num_stages=2)
    generator = torch.Generator().manual_seed(7 + stage())
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.2, generator=generator)
    model.get_submodule(str(model.parts[stage()] + 1)).up.weight.requires_grad_(False)
    values = [None, None]
    torch.distributed.all_gather_object(values, model.state_dict())
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.3},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    config = pipes.config_of(zero)
    taken: dict[str, Any] = {"model_parameters": groups}
    if given == "optimizer":
        del config["optimizer"]
        taken = {"optimizer": torch.optim.AdamW(groups, lr=0.01)}
    engine = ds.initialize(model=model, config=config, **taken)[0]
    losses = [float(engine.train_batch(pipes.batches("modules", step, 0))) for step in range(3)]
    engine.destroy()
    plain = pipes.plain_of("modules")
    plain.load_state_dict({**values[0], **values[1]})
    frozen = {f"{begin + 1}.up.weight" for begin in model.parts[:2]}
    for name, param in plain.named_parameters():
        param.requires_grad_(name not in frozen)
    return {"losses": _apart(losses, _trained(plain)), "weights": _far(model, plain)}


def _trained(plain: nn.Module) -> list[float]:
    trained = [one for one in plain.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.3},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = pipes.plain_loss(plain, "modules", step, 1, pipes.MICRO)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _far(model: nn.Module, plain: nn.Module) -> float:
    theirs = dict(plain.named_parameters())
    return max(float((one - theirs[name]).abs().max()) for name, one in model.named_parameters())


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("given", ["model_parameters", "optimizer"])
def test_a_stage_decides_about_its_layers(given, zero, drop_in_pools):
    for told in drop_in_pools(2).run(by_owner, given, zero):
        assert max(told.values()) < 1e-5, told


def loaded_later(zero: int) -> list[float]:
    """state_dict() of the stage after a step, and load_state_dict() of it into a trained engine."""
    model = pipes.built("modules", num_stages=2)
    engine = pipes.deepspeed().initialize(model=model, config=pipes.config_of(zero))[0]

    def step(index: int) -> float:
        return float(engine.train_batch(pipes.batches("modules", index, 0)))

    step(0)
    sizes = [one["exp_avg"].numel() for one in engine.basic_optimizer.state.values()]
    own = {engine.native.name_of(one) for one in model.parameters()}
    names = [name for name, _ in model.whole.named_parameters()]
    if zero == 0:
        assert [size > 0 for size in sizes] == [name in own for name in names]
    kept = {name: one.clone() for name, one in engine.module.state_dict().items()}
    whole = engine.native.state_dict(rank0_only=False)
    same = max(float((one - whole[name]).abs().max()) for name, one in kept.items())
    first = float(engine.eval_batch(pipes.batches("modules", 9, 0)))
    step(1)
    moved = float(engine.eval_batch(pipes.batches("modules", 9, 0)))
    engine.module.load_state_dict(kept)
    again = float(engine.eval_batch(pipes.batches("modules", 9, 0)))
    engine.destroy()
    return [same, again - first, abs(moved - first)]


@pytest.mark.parametrize("zero", [0, 1])
def test_the_state_of_a_stage(zero, drop_in_pools):
    for same, back, moved in drop_in_pools(2).run(loaded_later, zero):
        assert same == 0 and abs(back) < LIMIT < moved


def _own_parameter(model: Any) -> dict[str, Any]:
    model.scale = nn.Parameter(torch.ones(2))
    return {}


def _other_tensors(model: Any) -> dict[str, Any]:
    if stage() == 1:
        model.forward_funcs[-1].register_buffer("extra", torch.ones(1))
    return {}


def _other_groups(model: Any) -> dict[str, Any]:
    params = list(model.parameters())
    groups = [{"params": params}] if stage() == 0 else [{"params": [one]} for one in params[:2]]
    return {"model_parameters": groups}


REFUSED = [
    (_own_parameter, r'"scale" on some ranks only, or outside its layers: create it in the constr'),
    (_other_tensors, r'"6.extra" on some ranks only'),
    (_other_groups, r"the optimizer has \[1, 2\] groups on the stages; these numbers"),
]


def refused(index: int) -> str:
    model = pipes.built("modules", num_stages=2)
    taken = REFUSED[index][0](model)
    return raised(
        lambda: pipes.deepspeed().initialize(model=model, config=pipes.config_of(), **taken)
    )


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_all_ranks_refuse(index, drop_in_pools):
    for text in drop_in_pools(2).run(refused, index):
        assert re.search(REFUSED[index][1], text), text


def edited_layers(which: int) -> str:
    """The error of initialize() for a module whose stage `which` replaced a layer."""
    ds = pipes.deepspeed()
    shared = ds.pipe.TiedLayerSpec("same", nn.Identity, tied_weight_attr=[])  # no parameters
    model = ds.pipe.PipelineModule(
        [nn.Embedding(VOCAB, WIDTH), shared, shared, nn.Linear(WIDTH, VOCAB)],
        num_stages=2,
        loss_fn=pipes.cross_entropy,
    )
    if stage() == which:
        model.forward_funcs[-1] = torch.zeros_like
    return raised(lambda: ds.initialize(model=model, config=pipes.config_of()))


@pytest.mark.parametrize("which", [0, 1])
def test_an_edit_of_forward_funcs_is_refused_on_all_stages(which, drop_in_pools):
    for error in drop_in_pools(2).run(edited_layers, which):
        assert "PipelineModule.forward_funcs was edited" in str(error), error


def edited_by_one(kind: str) -> str:
    """The error of initialize() if one of two data ranks changes its module."""
    model = pipes.built("modules", num_stages=1)
    if dist.get_rank() == 1 and kind == "layer":
        model.forward_funcs[-1] = torch.zeros_like
    if dist.get_rank() == 1 and kind == "parameter":
        model.scale = nn.Parameter(torch.ones(2))
    return raised(lambda: pipes.deepspeed().initialize(model=model, config=pipes.config_of()))


ONE_DATA_RANK = {
    "layer": "PipelineModule.forward_funcs was edited",
    "parameter": '"scale" on some ranks only',
}


@pytest.mark.parametrize("kind", ONE_DATA_RANK)
def test_all_data_ranks_refuse(kind, drop_in_pools):
    for error in drop_in_pools(2).run(edited_by_one, kind):
        assert ONE_DATA_RANK[kind] in str(error), error
