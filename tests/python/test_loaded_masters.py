"""fp32 values that are loaded into a low-precision engine become its masters exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

SIZES = (7, 9, 4)


class Net(nn.Module):
    """Two layers whose first weight is tied to a third layer, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        first, middle, last = SIZES
        self.enter, self.leave = nn.Linear(first, middle), nn.Linear(middle, last)
        self.again = nn.Linear(first, middle, bias=False)
        self.again.weight = self.enter.weight
        self.frozen = nn.Linear(last, last)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(last))

    def forward(self, x):
        hidden = torch.tanh(self.enter(x)) + self.again(x)
        return self.frozen(self.leave(hidden)) * self.scale


def loaded_state(seed=3):
    """fp32 values that bf16 and fp16 round, and one weight in bf16."""
    draw = torch.Generator().manual_seed(seed)
    state = {
        name: torch.rand(value.shape, generator=draw) + 0.1
        for name, value in Net().state_dict().items()
    }
    state["again.weight"] = state["enter.weight"]
    state["leave.weight"] = state["leave.weight"].bfloat16()
    return state


def made(config):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    return penstock.initialize(Net(), config, optimizer={"type": "AdamW", "lr": 0.5})


def through_drop_in(engine, state):
    import penstock.deepspeed  # noqa: PLC0415

    penstock.deepspeed.install()
    import deepspeed  # noqa: PLC0415

    around = SimpleNamespace(native=engine, module=engine.module)
    deepspeed.DeepSpeedEngine.load_module_state_dict(around, {"module": state})


def assert_masters(engine, wanted):
    """Masters of trained parameters, values of frozen ones and buffers."""
    low = next(engine.module.parameters()).dtype
    kept = engine.state_dict(rank0_only=False)
    for name, value in wanted.items():
        exact = value.to(low).float() if name.startswith("frozen") else value.float()
        assert kept[name].float().equal(exact), name
    with engine.gathered():
        for name, param in engine.module.named_parameters():
            assert param.equal(wanted[name].to(param.dtype)), name


OFFLOADS = {
    "memory": {},
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "all on disk": {"optimizer": "disk", "params": "disk"},
}
CASES = [
    (strategy, precision, offload)
    for strategy in ("ddp", "zero1", "zero2", "zero3")
    for precision in ("bf16", "fp16")
    for offload in OFFLOADS
    if strategy == "zero3" or offload != "all on disk"
]


def step(engine, rank=None):
    seed = dist.get_rank() if rank is None else rank
    dtype = next(engine.module.parameters()).dtype
    batch = torch.rand((2, SIZES[0]), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(batch.to(dtype)).float().pow(2).mean())
    engine.step()


def load_and_train(strategy, precision, offload, folder):
    config = {"strategy": strategy, "precision": precision, "loss_scale": {"initial": 8.0}}
    if precision != "fp16":
        config.pop("loss_scale")
    tiers = dict(OFFLOADS[offload])
    if "disk" in tiers.values():
        tiers["path"] = folder
    engine = made({**config, "offload": tiers})
    step(engine)
    state = loaded_state()
    engine.load_state_dict(state)
    assert_masters(engine, state)
    # Masters that only differ below the precision of the weights are replaced, too.
    close = {n: v if v.dtype != torch.float32 else v * (1 + 2.0**-20) for n, v in state.items()}
    engine.load_state_dict(close)
    assert_masters(engine, close)
    # A part keeps the other masters.
    part = {"leave.bias": torch.full((SIZES[2],), 1 / 3)}
    keys = engine.load_state_dict(part, strict=False)
    assert "enter.weight" in keys.missing_keys
    assert not keys.unexpected_keys
    assert_masters(engine, close | part)
    step(engine)
    kept = engine.state_dict(rank0_only=False)
    engine.close()
    return {name: value.clone() for name, value in kept.items()}


@pytest.mark.parametrize(("strategy", "precision", "offload"), CASES)
def test_masters_are_the_loaded_values(strategy, precision, offload, pools, tmp_path):
    first, second = pools(2).run(load_and_train, strategy, precision, offload, str(tmp_path))
    for name, value in first.items():
        assert value.equal(second[name]), name


def other_ranks(strategy):
    """The weights of rank 0 count; the others need not have any."""
    engine = made({"strategy": strategy, "precision": "bf16"})
    state = loaded_state()
    engine.load_state_dict(state if dist.get_rank() == 0 else {}, strict=dist.get_rank() == 0)
    trained = {n: v for n, v in state.items() if n != "scale"}
    assert_masters(engine, trained)
    engine.load_state_dict(loaded_state(seed=dist.get_rank()))
    wanted = {n: v for n, v in loaded_state(seed=0).items() if n != "scale"}
    assert_masters(engine, wanted)
    engine.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_first_rank_gives_the_weights(strategy, pools):
    pools(2).run(other_ranks, strategy)


def edits_and_errors():
    engine = made({"strategy": "zero3", "precision": "bf16"})
    state = loaded_state()
    engine.load_state_dict(state)
    for wrong in ({"enter.weight": state["enter.weight"]}, state | {"more": torch.ones(1)}):
        with pytest.raises(RuntimeError, match="Missing key|Unexpected key"):
            engine.load_state_dict(wrong)
        assert_masters(engine, state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load_state_dict(state | {"leave.bias": torch.ones(5)})
    assert_masters(engine, state)
    # An override that changes the values: its values count, in their precision.
    engine.module.register_load_state_dict_pre_hook(
        lambda module, given, *_: given.update({n: v * 2 for n, v in given.items()})
    )
    engine.load_state_dict(dict(state))
    assert_masters(engine, {n: v * 2 for n, v in state.items()})
    # Inside the block the masters take what the parameters hold.
    with engine.gathered(write=True):
        engine.module.leave.bias.data.copy_(torch.full((SIZES[2],), 1 / 3))
    rounded = torch.full((SIZES[2],), 1 / 3).bfloat16().float()
    assert engine.state_dict(rank0_only=False)["leave.bias"].equal(rounded)
    engine.close()


def test_edits_and_errors(pools):
    pools(2).run(edits_and_errors)


def own_optimizer(strategy):
    """The masters are lent to an optimizer that updates them."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = penstock.initialize(
        model, {"strategy": strategy, "precision": "bf16"}, optimizer=optimizer
    )
    step(engine)
    state = loaded_state()
    engine.load_state_dict(state)
    assert_masters(engine, state)
    step(engine)
    engine.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_masters_of_a_users_optimizer(strategy, pools):
    pools(2).run(own_optimizer, strategy)


def drop_in(strategy):
    engine = made({"strategy": strategy, "precision": "bf16"})
    state = loaded_state()
    through_drop_in(engine, state)
    assert_masters(engine, state)
    engine.close()


def test_load_module_state_dict(drop_in_pools):
    drop_in_pools(2).run(drop_in, "zero3")


LAYOUTS = {
    "tiles": {"tiling": {"max_bytes": 64}},
    "hpz": {"strategy": "hpz", "mesh": {"node": 2}},
    "fp32 layer": {"dtypes": {"leave.*": "fp32"}},
    "late update": {"offload": {"optimizer": "host", "late_update": True}},
    "bf16 moments": {"optimizer": {"type": "AdamW", "lr": 0.5, "moments_dtype": "bf16"}},
}


def in_layout(layout):
    engine = made({"strategy": "zero3", "precision": "bf16", **LAYOUTS[layout]})
    state = loaded_state()
    engine.load_state_dict(state)
    trained = {n: v for n, v in state.items() if not n.startswith("frozen")}
    kept = engine.state_dict(rank0_only=False)
    for name, value in trained.items():
        assert kept[name].float().equal(value.float()), name
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, pools):
    pools(2).run(in_layout, layout)
