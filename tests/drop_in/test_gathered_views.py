"""Views of parameters that are taken inside GatheredParameters keep their values after it."""

from __future__ import annotations

from typing import Any

import pipe_models as pipes
import pytest
import torch

STAGE3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8, dtype=engine.module[0].weight.dtype)).square().mean())
    engine.step()


def views_of(ds: Any, model: torch.nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """Returns views, as scripts collect a state dict. On a CPU, `.cpu()` makes no copy."""
    found = {}
    for name, param in model.named_parameters():
        with ds.zero.GatheredParameters(param, **options):
            found[name] = param.detach().cpu()
    return found


def read_on_one_rank(config: dict[str, Any], built_in_init: bool) -> list[Any]:
    """Returns whether views that were taken before and after a step have the weights of then."""
    ds = pipes.deepspeed()
    config = STAGE3 | config
    with ds.zero.Init(config_dict_or_path=config, enabled=built_in_init):
        model = net()
    told = []
    plain = {name: one.to(model[0].weight.dtype) for name, one in net().named_parameters()}
    if built_in_init:
        early = views_of(ds, model)
        told.append(all(torch.equal(early[name], plain[name]) for name in plain))
    engine = ds.initialize(model=model, config=config)[0]
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    before = views_of(ds, model)
    train(engine)
    after = views_of(ds, model)
    weights = engine.native.state_dict(rank0_only=False)
    saved = {name: one.to(dtype) for name, one in weights.items()}
    train(engine)
    if torch.distributed.get_rank() == 0:  # the other rank is in destroy() then
        told += [
            all(torch.equal(before[name], plain[name].to(dtype)) for name in plain),
            all(torch.equal(after[name], saved[name]) for name in saved),
        ]
    engine.destroy()
    moved = [not torch.equal(one, after[name]) for name, one in model.named_parameters()]
    return [*told, any(moved)]


@pytest.mark.parametrize("built_in_init", [False, True])
@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_a_view_keeps_its_values(config, built_in_init, drop_in_pools):
    for told in drop_in_pools(2).run(read_on_one_rank, config, built_in_init):
        assert all(told), told


def written() -> list[Any]:
    """Writes on rank 1, and takes views in two nested blocks, of which one is in no-grad mode."""
    ds = pipes.deepspeed()
    engine = ds.initialize(model=net(), config=STAGE3)[0]
    weight = engine.module[1].weight
    with ds.zero.GatheredParameters(weight, modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                weight.fill_(3.0)
        outer = weight.data
    with ds.zero.GatheredParameters(engine.module.parameters()):
        with ds.zero.GatheredParameters([weight]):
            inner = weight.detach()[:2]
        still = inner.mean().item()
        output = engine.module(torch.ones(2, 8)).sum()
    train(engine)  # the graph of the block's forward is still alive
    with ds.zero.GatheredParameters(weight):
        now = weight.mean().item()
    told = [outer.mean().item(), still, inner.mean().item(), now != 3.0, output.requires_grad]
    engine.destroy()
    return told


def test_a_view_of_written_values(drop_in_pools):
    for told in drop_in_pools(2).run(written):
        assert told == [3.0, 3.0, 3.0, True, True]


def seen_before() -> list[str]:
    """A tensor that shared the parameter before the block stays a view of the parameter."""
    ds = pipes.deepspeed()
    model = net()
    old = model[0].weight.detach()
    engine = ds.initialize(model=model, config=STAGE3)[0]
    with ds.zero.GatheredParameters(model[0].weight):
        inside = old.mean().item()
    try:
        old.mean()
        told = "read"
    except RuntimeError as error:
        told = str(error)
    train(engine)
    engine.destroy()
    return [told, str(torch.equal(old, model[0].weight)), str(inside != old.mean().item())]


def test_a_view_from_before_the_block_stays_a_view(drop_in_pools):
    for told in drop_in_pools(2).run(seen_before):
        assert "is sharded and its unit" in told[0] and told[1:] == ["True", "True"]
