"""engine.state_dict(): what is in it, where, and what it costs."""

from __future__ import annotations

import gc

import models
import pytest
import torch
import torch.distributed as dist
import training
from test_api import every_strategy, initialize, start
from test_init import peak_kib
from torch import nn


def trained(strategy, **others):
    torch.manual_seed(0)
    engine = start(strategy, **others)
    batch = models.batches("gpt", 1, dist.get_world_size() * training.MICRO)[0]
    engine.backward(engine(*training.rank_part(batch, 0)))
    engine.step()
    return engine


def read_in_every_way(strategy, precision, others):
    engine = trained(strategy, precision=precision, **others)
    full = engine.state_dict()
    everywhere = engine.state_dict(rank0_only=False)
    low = engine.state_dict(dtype=torch.bfloat16, device="cpu")
    engine.close()
    if dist.get_rank() == 0:
        assert all(full[name].equal(everywhere[name]) for name in full)
        assert full["tokens.weight"] is full["head.weight"]
        assert list(full) == list(engine.module.state_dict())
        for name, value in low.items():
            assert value.dtype == torch.bfloat16
            assert value.equal(full[name].bfloat16())
    else:
        assert full == low == {}
    return everywhere


OPTIONS = [
    ("fp32", {}),
    ("bf16", {}),
    ("bf16", {"offload": {"optimizer": "disk", "params": "disk"}}),
    ("bf16", {"tiling": {"max_bytes": 3000}}),
]


@pytest.mark.parametrize(("precision", "others"), OPTIONS, ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "hpz", "mics"])
def test_who_gets_what(strategy, precision, others, pools):
    if "params" in others.get("offload", {}) and strategy not in ("zero3", "mics"):
        others = {"offload": {"optimizer": "disk"}}
    first, second = pools(2).run(read_in_every_way, strategy, precision, others)
    assert all(first[name].equal(second[name]) for name in first)


def read_on_nodes(strategy):
    """Where shards have several holders, only the first of them sends."""
    engine = trained(strategy, mesh={"node": 2})
    first = engine.state_dict()
    everywhere = engine.state_dict(rank0_only=False)
    again = engine.state_dict()
    engine.close()
    return all(first[n].equal(everywhere[n]) and again[n].equal(first[n]) for n in first)


@pytest.mark.parametrize("strategy", ["hpz", "mics", "zero1"])
def test_on_nodes(strategy, pools):
    assert pools(4).run(read_on_nodes, strategy) == [True] * 4


def refuse_dtype():
    import penstock  # noqa: PLC0415

    engine = trained("zero3")
    with pytest.raises(penstock.ConfigError, match=r"torch\.int8"):
        engine.state_dict(dtype=torch.int8)
    engine.close()


def test_a_dtype_that_is_not_floating(pools):
    pools(2).run(refuse_dtype)


def measure(strategy, layers, width, others):
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    unit = width * width * 4
    config = {"strategy": strategy, "units": {"max_bytes": unit}, "optimizer": {"type": "SGD"}}
    engine = initialize(model, config | others)
    engine.backward(engine(torch.ones(2, width)).square().mean())
    engine.step()
    before = engine.ledger()["measured"]
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start_kib = peak_kib()
    state = engine.state_dict()
    took = peak_kib() - start_kib
    after = engine.ledger()["measured"]
    num = len(state)
    del state
    engine.close()
    return took, num, after["buffers"] - before["buffers"]


@pytest.mark.parametrize("others", [{}, {"optimizer": {"type": "AdamW"}}], ids=str)
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_memory_on_other_ranks_is_a_shard_of_a_unit(strategy, others, pools):
    layers, width = 16, 1024  # 64 MiB in fp32
    unit = width * width * 4 // 1024
    first, second = pools(2).run(measure, strategy, layers, width, others)
    assert first[0] < (layers + 1) * unit + 4096, f"{first[0]} KiB for {layers} of {unit}"
    assert second[0] < unit + 4096, f"{second[0]} KiB for a unit of {unit}"
    assert (first[1], second[1]) == (layers, 0)


def tight():
    import penstock  # noqa: PLC0415

    width = 512
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    engine = penstock.initialize(model, {"strategy": "zero3", "units": {"modules": ["Linear"]}})
    engine.backward(engine(torch.ones(2, width)).square().mean())
    engine.step()
    before = engine.ledger()["measured"]["buffers"]
    engine.state_dict(rank0_only=False)
    grown = engine.ledger()["measured"]["buffers"]
    engine.close()
    return before, grown


def test_the_ledger_counts_the_unit_on_its_way(pools):
    for before, grown in pools(2).run(tight):
        assert grown >= max(before, 512 * 512 * 4)


class Extra(nn.Module):
    """Says more of itself than tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.linear(x)).square().mean()

    def get_extra_state(self):
        return {"seen": 3, "names": ["a", "b"]}

    def set_extra_state(self, state):
        self.found = state


def with_extra_state(strategy):
    torch.manual_seed(0)
    model = Extra()
    engine = initialize(model, {"strategy": strategy})
    torch.manual_seed(dist.get_rank())
    engine.backward(engine(torch.randn(4, 6)))
    engine.step()
    state = engine.state_dict()
    engine.close()
    if dist.get_rank() == 0:
        theirs = model.state_dict()
        assert list(state) == list(theirs)
        assert state["_extra_state"] == theirs["_extra_state"]
        assert state._metadata == theirs._metadata
        fresh = Extra()
        fresh.load_state_dict(state)
        assert fresh.found == {"seen": 3, "names": ["a", "b"]}
        assert fresh.linear.weight.equal(model.linear.weight)


@every_strategy
def test_extra_state_is_torchs(strategy, pools):
    pools(2).run(with_extra_state, strategy)


def with_hooks(strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = initialize(model, {"strategy": strategy, "units": {"modules": ["Linear"]}})
    plain = engine.state_dict()
    called = []

    def halve(_module, state, prefix, _metadata):
        state[f"{prefix}half"] = state[f"{prefix}weight"] / 2

    def rename(_module, state, prefix, _metadata):
        return {name.replace("weight", "kernel"): value for name, value in state.items()}

    model[0].register_state_dict_post_hook(halve)
    model.register_state_dict_pre_hook(lambda _m, prefix, keep: called.append(prefix))
    model._register_state_dict_hook(rename)
    state = engine.state_dict()
    if dist.get_rank() == 0:
        assert called == [""]
        assert list(state) == ["0.kernel", "0.bias", "0.half", "1.kernel", "1.bias"]
        assert state["0.half"].equal(plain["0.weight"] / 2)
        assert state["1.kernel"].equal(plain["1.weight"])
    # One that reads the module itself sees full values, too.
    handle = model[1].register_state_dict_pre_hook(lambda m, *_: called.append(m.weight.sum()))
    engine.state_dict()
    if dist.get_rank() == 0:
        assert called[-1] == plain["1.weight"].sum()
    with engine.gathered():
        assert len(engine.state_dict()) == (5 if dist.get_rank() == 0 else 0)
    handle.remove()
    engine.backward(engine(torch.ones(2, 6)).mean())
    engine.step()
    engine.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_hooks_see_full_values(strategy, pools):
    pools(2).run(with_hooks, strategy)
