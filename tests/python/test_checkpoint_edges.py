"""What a reader found around checkpoints: errors of one rank, other objects, other optimizers."""

from __future__ import annotations

import pathlib
import resource

import pytest
import torch
import torch.distributed as dist
from test_api import initialize
from test_checkpoint import tiny, tiny_step
from test_resumable_loader import loader_of
from torch import nn


def one_rank_alone(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    tiny_step(engine)
    state = torch.ones(2) if dist.get_rank() == 1 else None
    with pytest.raises(penstock.ConfigError, match="rank 1: .*client_state is a torch.Tensor"):
        engine.save(folder, client_state=state)
    tiny_step(engine)
    engine.save(folder)
    engine.close()


def test_an_error_of_one_rank_is_everyones(pools, tmp_path):
    pools(2).run(one_rank_alone, str(tmp_path))


def no_room_on_one_rank(folder, config):
    """A save that cannot begin leaves nothing that a later step would wait for."""
    import penstock  # noqa: PLC0415

    engine = tiny(config)
    tiny_step(engine)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(penstock.RuntimeFault, match="rank 1: .*cannot write"):
            engine.save(folder, wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tiny_step(engine, 2)
    engine.save(folder, wait=False)
    tiny_step(engine, 2)
    engine.close()


@pytest.mark.parametrize("tier", ["none", "disk"])
def test_a_save_that_cannot_begin_holds_nobody(tier, pools, tmp_path):
    config = {"offload": {"optimizer": "disk", "path": str(tmp_path)}} if tier == "disk" else {}
    pools(2).run(no_room_on_one_rank, str(tmp_path / "ck"), config)


def in_the_way(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    if dist.get_rank() == 0:
        (pathlib.Path(folder) / "logs").mkdir(parents=True)
        (pathlib.Path(folder) / "logs" / "precious").write_text("text")
        for name in ("model_ema.safetensors", "modelB.index.json"):
            (pathlib.Path(folder) / name).write_text("mine")
    dist.barrier()
    with pytest.raises(penstock.RuntimeFault, match="exists and is not a checkpoint"):
        engine.save(folder, tag="logs")
    engine.export_hf(folder)
    engine.export_hf(folder, max_shard_bytes=100)
    engine.close()


def test_what_is_the_users_stays(pools, tmp_path):
    pools(2).run(in_the_way, str(tmp_path))
    assert (tmp_path / "logs" / "precious").read_text() == "text"
    for name in ("model_ema.safetensors", "modelB.index.json"):
        assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "model.safetensors").exists()


def into_fp16(folder):
    engine = tiny()
    tiny_step(engine)
    engine.save(folder)
    engine.close()
    half = tiny({"precision": "fp16"})
    half.load(folder)
    assert half.loss_scale == 65536
    half.close()


def test_the_loss_scale_is_the_engines_own_where_none_was_saved(pools, tmp_path):
    pools(1).run(into_fp16, str(tmp_path))


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.state["global"]["count"] = self.state["global"].get("count", 0) + 1
        return super().step(closure)


def groups_of(model, order):
    layers = list(model)
    rates = [0.1, 0.001]
    return torch.optim.RMSprop(
        [{"params": layers[i].parameters(), "lr": rates[i]} for i in order], lr=1.0
    )


def of_their_own(folder):
    import penstock  # noqa: PLC0415

    def engine_with(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return initialize(model, {"comm": {"timeout_s": 20}}, optimizer=make(model))

    engine = engine_with(lambda model: Counting(model.parameters(), lr=0.1))
    tiny_step(engine)
    with pytest.raises(penstock.ConfigError, match="keeps state under 'global'"):
        engine.save(folder)
    engine.close()
    engine = engine_with(lambda model: groups_of(model, [0, 1]))
    tiny_step(engine)
    engine.save(folder)
    engine.close()
    other = engine_with(lambda model: groups_of(model, [1, 0]))
    with pytest.raises(
        penstock.ConfigError, match="group 0 of the optimizer differs from the checkpoint"
    ):
        other.load(folder)
    other.close()


def test_optimizers_of_ones_own(pools, tmp_path):
    pools(2).run(of_their_own, str(tmp_path))


class Aged(torch.optim.Optimizer):
    """Counts its steps in a tensor of shape (1,), which is also the shape of a shard."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"age": torch.zeros(1), "sum": torch.zeros_like(param)}
                state["age"] += 1
                state["sum"] += param.grad
                param -= group["lr"] / state["age"] * state["sum"]


class Odd(nn.Module):
    """With two ranks, one has a single element of `values`."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(0, 1, 129))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.values * x - self.one).square().sum()


def aged(strategy, folder, steps, resumes):
    """Takes steps, after a load and a save if `resumes`, then saves. Returns the weights."""
    config = {"strategy": strategy, "comm": {"timeout_s": 20}}
    engine = initialize(Odd(), config, optimizer=lambda params: Aged(params))
    if resumes:
        engine.load(folder)
        engine.save(folder, "again")
        engine.load(folder, "again")
    for _ in range(steps):
        engine.backward(engine(torch.full((129,), 0.5)))
        engine.step()
    if not resumes:
        engine.save(folder)
    ages = [state["age"].shape for state in engine.optimizer.state.values()]
    weights = [value.tolist() for value in engine.state_dict(rank0_only=False).values()]
    engine.close()
    return weights, ages


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_state_of_one_element_is_saved(strategy, world, pools, tmp_path):
    wanted = pools(2).run(aged, strategy, str(tmp_path / "a"), 4, False)[0][0]
    pools(2).run(aged, strategy, str(tmp_path / "b"), 2, False)
    for weights, ages in pools(world).run(aged, strategy, str(tmp_path / "b"), 2, True):
        assert ages and all(shape == (1,) for shape in ages)
        for ours, theirs in zip(weights, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def with_milestones(folder):
    def scheduler(optimizer):
        lr = torch.optim.lr_scheduler
        parts = [lr.LinearLR(optimizer, total_iters=3), lr.MultiStepLR(optimizer, [2, 4])]
        return lr.SequentialLR(optimizer, parts, milestones=[3])

    def engine_with():
        return tiny(optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), lr_scheduler=scheduler)

    engine = engine_with()
    tiny_step(engine, 2)
    engine.save(folder)
    wanted, found = [], []
    for _ in range(6):
        tiny_step(engine)
        wanted.append(engine.lr)
    engine.close()
    other = engine_with()
    other.load(folder)
    for _ in range(6):
        tiny_step(other)
        found.append(other.lr)
    other.close()
    return wanted, found


def test_schedulers_with_counters(pools, tmp_path):
    for wanted, found in pools(1).run(with_milestones, str(tmp_path)):
        assert wanted == found


def groups_that_came(folder):
    """Groups added after the last step are scheduled like the others when they are loaded."""

    def engine_with(groups):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parts = [model[0].parameters(), model[1].parameters()]
        if groups == 1:
            model[1].requires_grad_(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.AdamW([{"params": list(p)} for p in parts], lr=0.1)
        schedule = {"type": "linear", "total_steps": 10}
        return initialize(model, {"schedule": schedule}, optimizer=optimizer)

    engine = engine_with(1)
    tiny_step(engine)
    moved = list(engine.module[1].parameters())
    group = engine.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if all(p is not other for other in moved)]
    engine.optimizer.add_param_group({"params": moved, "lr": 0.05})
    engine.save(folder)
    tiny_step(engine, 3)
    wanted = [group["lr"] for group in engine.optimizer.param_groups]
    engine.close()
    other = engine_with(2)
    other.load(folder)
    tiny_step(other, 3)
    found = [group["lr"] for group in other.optimizer.param_groups]
    other.close()
    return wanted, found


def test_groups_that_came_later(pools, tmp_path):
    for wanted, found in pools(1).run(groups_that_came, str(tmp_path)):
        assert wanted == found


def another_loader(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    engine.register_for_checkpointing(loader_of(seed=3))
    tiny_step(engine)
    engine.save(folder)
    engine.close()
    other = tiny()
    other.register_for_checkpointing(loader_of(seed=4))
    tiny_step(other, 2)
    before = other.state_dict(rank0_only=False)
    with pytest.raises(penstock.ConfigError, match="seed is 4 here and 3 in the checkpoint"):
        other.load(folder)
    after = other.state_dict(rank0_only=False)
    assert all(before[name].equal(after[name]) for name in before)
    assert other.steps == 2
    other.close()


class Refusing:
    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        if dist.get_rank() == 1:
            raise KeyError("something of mine")


def refused_late(folder):
    import penstock  # noqa: PLC0415

    engine = tiny()
    engine.register_for_checkpointing(Refusing())
    engine.save(folder)
    with pytest.raises(penstock.RuntimeFault, match="rank 1: KeyError: 'something of mine'"):
        engine.load(folder)
    with pytest.raises(penstock.RuntimeFault, match="could not be applied"):
        tiny_step(engine)
    engine.close()


def test_objects_that_refuse(pools, tmp_path):
    pools(2).run(another_loader, str(tmp_path / "one"))
    pools(2).run(refused_late, str(tmp_path / "two"))


class Tied(nn.Module):
    """A layer that trains, and a frozen weight under two names."""

    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.one.requires_grad_(False)

    def forward(self, x):
        return self.head(self.two(self.one(x)))


def load_the_other_name(folder):
    engine = initialize(Tied())
    engine.load(folder, weights_only=True, frozen=False)
    state = engine.state_dict()
    engine.close()
    return state


def test_a_frozen_tied_weight_is_loaded_under_its_other_name(pools, tmp_path):
    """frozen=False keeps only what the checkpoint has under none of the names."""
    from penstock import conversion  # noqa: PLC0415

    torch.manual_seed(5)
    state = Tied().state_dict()
    del state["one.weight"]
    torch.save(state, tmp_path / "model.pt")
    conversion.convert(tmp_path / "model.pt", tmp_path / "made")
    found = pools(2).run(load_the_other_name, str(tmp_path / "made"))[0]
    torch.testing.assert_close(found["one.weight"], state["two.weight"], rtol=0, atol=0)
    torch.testing.assert_close(found["head.bias"], state["head.bias"], rtol=0, atol=0)
