"""Loops of RLHF projects with several engines: as in plain torch on the same ranks."""

from __future__ import annotations

import pathlib
from typing import Any

import pipe_models as pipes
import pytest
import rlhf_cases
import torch
import torch.distributed as dist

import penstock


def both(name: str, folder: str) -> tuple[list[float], list[float]]:
    """On a rank: the results of plain torch and of the drop-in."""
    ds = pipes.deepspeed()
    import plain_deepspeed  # noqa: PLC0415 - transformers is imported after the drop-in
    import rlhf_loops  # noqa: PLC0415
    import rlhf_models  # noqa: PLC0415

    place = pathlib.Path(folder)
    if dist.get_rank() == 0 and not (place / "base").exists():
        rlhf_models.write_models(place)
    dist.barrier()
    loop, options = rlhf_cases.CASES[name]
    found = []
    for package in (plain_deepspeed, ds):
        torch.manual_seed(0)
        found.append(getattr(rlhf_loops, loop)(package, place, **options))
    return found[0], found[1]


def pytest_generate_tests(metafunc):
    if "loop" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("loop", list(rlhf_cases.CASES) if full else rlhf_cases.SAMPLE)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return str(tmp_path_factory.mktemp("models"))


def test_as_plain(loop, models, drop_in_pools):
    for plain, ours in drop_in_pools(2).run(both, loop, models):
        assert ours == pytest.approx(plain, abs=1e-5, rel=1e-5)


def small(
    with_engine: bool, trains: bool = True, **section: Any
) -> tuple[Any, torch.nn.Module, Any]:
    """A model under ZeRO-3: in zero.Init, or with an engine, with an optimizer or without."""
    ds = pipes.deepspeed()
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **section}}
    with ds.zero.Init(enabled=not with_engine, config_dict_or_path=config):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    if trains:
        config["optimizer"] = optimizer
    engine = ds.initialize(model=model, config=config)[0] if with_engine else None
    return ds, model, engine


def edits(with_engine: bool) -> None:
    """Changes without a modifier_rank: the same on all ranks are kept, others are refused."""
    ds, model, engine = small(with_engine)
    weight, norm = model[0].weight, model[1].weight
    with ds.zero.GatheredParameters([weight, norm]):
        norm.data.copy_(norm.data.lerp(weight.data[0], 0.5))  # all elements were 1
        wanted = norm.data.clone()
    with ds.zero.GatheredParameters([norm]):
        assert torch.equal(norm.data, wanted)
    with pytest.raises(penstock.RuntimeFault, match="chang|edit"):
        with ds.zero.GatheredParameters([norm]):
            norm.data += dist.get_rank()
    with ds.zero.GatheredParameters([norm]):
        assert torch.equal(norm.data, wanted)
    if engine is not None:
        engine.destroy()


def checked_edits(with_engine: bool) -> None:
    """With enable_sanity_checks a change without a modifier_rank is refused on every rank."""
    ds, model, engine = small(with_engine, enable_sanity_checks=True)
    weight = model[0].weight
    with ds.zero.GatheredParameters([weight]):
        wanted = weight.data.clone()
    for write in (lambda: weight.add_(0.0), lambda: weight.data.add_(1.0)):
        with pytest.raises(RuntimeError, match="in-place modification"):
            with ds.zero.GatheredParameters([weight]), torch.no_grad():
                write()
        with ds.zero.GatheredParameters([weight]):
            assert torch.equal(weight.data, wanted)
    if engine is not None:
        engine.destroy()


@pytest.mark.parametrize("with_engine", (False, True))
@pytest.mark.parametrize("case", (edits, checked_edits))
def test_edits_without_a_rank(case, with_engine, drop_in_pools):
    drop_in_pools(2).run(case, with_engine)


def entries(with_engine: bool, folder: str) -> None:
    """state_dict() of a sharded model can be saved and has no values; in a block it has."""
    ds, model, engine = small(with_engine)
    torch.save(model.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    found = torch.load(f"{folder}/{dist.get_rank()}.pt")
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(one.numel() == 0 for one in found.values())
    with ds.zero.GatheredParameters(model.parameters()):
        assert model.state_dict()["0.weight"].shape == (4, 4)
    if engine is not None:
        assert engine.native.state_dict(rank0_only=False)["0.weight"].shape == (4, 4)
        engine.destroy()


@pytest.mark.parametrize("with_engine", (False, True))
def test_entries_of_state_dict(with_engine, drop_in_pools, tmp_path):
    drop_in_pools(2).run(entries, with_engine, str(tmp_path))


def read_then_trained() -> None:
    """An optimizer may be made while an engine without one reads the model."""
    ds, model, reads = small(True, trains=False)
    assert all(one.requires_grad for one in model.parameters())
    before = reads(torch.eye(4))
    assert not before.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = ds.initialize(model=model, optimizer=optimizer, config=config)[0]
    out = engine(torch.eye(4))
    assert torch.equal(out, before)
    engine.backward(out.square().mean())
    engine.step()
    assert not torch.equal(engine(torch.eye(4)), before)
    engine.destroy()


def test_read_then_trained(drop_in_pools):
    drop_in_pools(2).run(read_then_trained)
