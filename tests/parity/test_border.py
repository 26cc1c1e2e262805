"""At the border with users' code: what people do to a model around an engine gives what plain torch
gives, or an error at that moment.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import models
import pytest
import torch
import torch.distributed as dist
import zoo
from ranks import Failure
from torch import nn

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])
SGD = {"type": "SGD", "lr": 0.5}
FEATURES = 6


class Net(nn.Module):
    """Features in, one number a sample out."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.leave = nn.Linear(FEATURES, zoo.HIDDEN), nn.Linear(zoo.HIDDEN, 1)
        self.blocks = nn.Sequential(*(zoo.Mlp() for _ in range(3)))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.lift(features))
        return self.leave(x).squeeze(-1)


def build() -> Net:
    return models.fill(Net())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, FEATURES, generator=generator), torch.randn(4, generator=generator)


def mine(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's half."""
    x, y = data(step)
    rank = dist.get_rank()
    return x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]


def start(strategy, precision="fp32", model=None, **others):
    import penstock  # noqa: PLC0415

    config = {"strategy": strategy, "precision": precision, "optimizer": SGD}
    others.setdefault("comm", {"timeout_s": 30})
    return penstock.initialize(build() if model is None else model, config | others)


def loss_of(model, x, y):
    dtype = next(model.parameters()).dtype
    return ((model(x.to(dtype)).float() - y) ** 2).mean()


def plain(steps, edit=None):
    """Weights after SGD steps on whole batches; `edit(model)` before the last."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for index, step in enumerate(steps):
        if edit is not None and index == len(steps) - 1:
            edit(model)
        optimizer.zero_grad()
        loss_of(model, *data(step)).backward()
        optimizer.step()
    return model.state_dict()


def assert_close(ours, theirs, precision="fp32"):
    assert list(ours) == list(theirs)
    limit = 1e-5 if precision == "fp32" else 2e-2
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=limit, atol=limit), name


# ---- parameters edited


def averaged_weights_are_swapped_in(strategy, precision):
    engine = start(strategy, precision)
    model = engine.module
    x, y = mine(0)
    engine.backward(loss_of(engine, x, y))
    with engine.gathered(write=True):
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
            inside = loss_of(engine, x, y)
        with engine.gathered([model.lift.weight]):
            assert torch.equal(model.lift.weight, kept[0] * 0.5)
        with torch.no_grad():
            again = loss_of(engine, x, y)
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(value)
    engine.step()
    with engine.gathered(write=True), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    state = engine.state_dict()
    engine.close()
    return state, float(inside), float(again)


@every_precision
@every_strategy
def test_averaged_weights_are_swapped_in(strategy, precision, pools):
    outcome = pools(2).run(averaged_weights_are_swapped_in, strategy, precision)
    half = build()
    with torch.no_grad():
        for p in half.parameters():
            p.mul_(0.5)
    x, y = data(0)
    for rank, (_, inside, again) in enumerate(outcome):
        part = slice(2 * rank, 2 * rank + 2)
        assert inside == again == pytest.approx(float(loss_of(half, x[part], y[part])), rel=2e-2)
    expected = {name: value / 2 for name, value in plain([0]).items()}
    assert_close(outcome[0][0], expected, precision)


def _clamp(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.0625, 0.0625)


def _clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.0625, 0.0625)


def _load(model):
    state = {name: value.clamp(-0.0625, 0.0625) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _other_memory(model):
    for p in model.parameters():
        p.data = p.data.clamp(-0.0625, 0.0625)


def _vector(model):
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector.clamp(-0.0625, 0.0625), model.parameters())


def _set(model):
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach().clamp(-0.0625, 0.0625))


EDITS = {
    "clamp": _clamp,
    "data": _clamp_data,
    "load_state_dict": _load,
    "other-memory": _other_memory,
    "vector": _vector,
    "set": _set,
}


def edits_between_steps_count(strategy, precision, edit, write):
    """`write`: inside gathered(write=True)."""
    engine = start(strategy, precision)
    for step in range(2):
        if step == 1:
            backup = [p.data for p in engine.module.parameters()]
            if write:
                with engine.gathered(write=True):
                    EDITS[edit](engine.module)
            else:
                EDITS[edit](engine.module)
            seen = engine.state_dict()
            del backup
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    kept = {name: p.detach().float() for name, p in engine.module.named_parameters()}
    return seen, state, kept


@pytest.mark.parametrize("edit", EDITS)
@every_precision
@every_strategy
def test_edits_between_steps_count(strategy, precision, edit, pools):
    write = strategy == "zero3"
    seen, state, kept = pools(2).run(edits_between_steps_count, strategy, precision, edit, write)[0]
    assert all(float(value.abs().max()) <= 0.0625 for value in seen.values())
    assert_close(state, plain([0, 1], _clamp), precision)
    assert_close(kept, state, precision)


def other_memory_for_sharded_parameters(strategy, precision, offload):
    engine = start(strategy, precision, offload=offload)
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()
    whole = build()
    for p, value in zip(engine.module.parameters(), whole.parameters(), strict=True):
        p.data = value.detach().to(p.dtype) / 4
    seen = engine.state_dict()
    engine.backward(loss_of(engine, *mine(1)))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return seen, state


def _quarter(model):
    with torch.no_grad():
        for p, value in zip(model.parameters(), build().parameters(), strict=True):
            p.copy_(value / 4)


@pytest.mark.parametrize("tier", ["device", "disk"])
@every_precision
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_other_memory_for_sharded_parameters(strategy, precision, tier, pools, tmp_path):
    offload = {}
    if tier == "disk":
        params = {"params": "disk"} if strategy == "zero3" else {}
        offload = {"optimizer": "disk", "path": str(tmp_path)} | params
    run = pools(2).run(other_memory_for_sharded_parameters, strategy, precision, offload)
    seen, state = run[0]
    half = build()
    _quarter(half)
    assert_close(seen, half.state_dict(), precision)
    assert_close(state, plain([0, 1], _quarter), precision)


def who_shares_the_old_memory_keeps_it(strategy):
    """Averaged weights are swapped in and out by `.data`, without a copy."""
    engine = start(strategy)
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()
    mean = [torch.zeros_like(p) for p in engine.module.parameters()]
    before = engine.state_dict()
    for _ in range(2):
        for i, p in enumerate(engine.module.parameters()):
            p.data, mean[i] = mean[i], p.data
        with torch.no_grad():
            loss_of(engine, *mine(1))
        state = engine.state_dict()
        if _ == 0:
            assert all(not value.any() for value in state.values())
    engine.close()
    return before, state


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_who_shares_the_old_memory_keeps_it(strategy, pools):
    before, state = pools(2).run(who_shares_the_old_memory_keeps_it, strategy)[0]
    assert_close(state, before)


def an_edit_that_would_be_lost_is_an_error(where):
    model = build()
    engine = start("zero3", model=model)
    if where == "gathered":
        with engine.gathered(), torch.no_grad():
            model.lift.weight.mul_(2)
    elif where == "gathered-data":
        with engine.gathered():
            model.lift.weight.data.mul_(2)
    else:
        inner = model.blocks[1].forward

        def forward(x):
            with torch.no_grad():
                next(model.blocks[1].parameters()).mul_(2)
            return inner(x)

        model.blocks[1].forward = forward
        loss_of(engine, *mine(0))


@pytest.mark.parametrize("where", ["gathered", "gathered-data", "forward"])
def test_an_edit_that_would_be_lost_is_an_error(where, pools):
    for failure in pools(2).attempt(an_edit_that_would_be_lost_is_an_error, where):
        assert isinstance(failure, Failure) and failure.is_a("RuntimeFault")
        assert "changed in place" in failure.text and "gathered(write=True)" in failure.text


def _half(model):
    model.half()


def _share(model):
    model.share_memory()


def _swap(model):
    other = nn.Parameter(torch.zeros_like(model.lift.weight))
    torch.utils.swap_tensors(model.lift.weight, other)


REFUSED = {
    "half": (_half, "precision"),
    "share": (_share, "memory"),
    "swap": (_swap, "swap_tensors"),
}


def a_parameter_that_became_another_is_an_error(strategy, how):
    engine = start(strategy)
    REFUSED[how][0](engine.module)
    loss_of(engine, *mine(0))


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_parameter_that_became_another_is_an_error(strategy, how, pools):
    words = REFUSED[how][1]
    for failure in pools(2).attempt(a_parameter_that_became_another_is_an_error, strategy, how):
        assert isinstance(failure, Failure)
        if how == "swap":  # torch's own refusal: the engine holds the accumulator
            assert "use_count of t1" in failure.text or words in failure.text
        elif strategy == "zero3":  # torch reads the values at once
            assert "is sharded" in failure.text
        else:
            assert failure.is_a("RuntimeFault") and words in failure.text
            assert '"lift' in failure.text


def test_parameters_over_one_memory_are_refused():
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(penstock.ConfigError, match=r'"0.weight" and "1.weight" share memory'):
        penstock.initialize(model, {"strategy": "ddp"})
    parts = torch.randn(40)
    torch.nn.utils.vector_to_parameters(parts, (apart := nn.Linear(4, 8)).parameters())
    penstock.initialize(apart, {"strategy": "ddp"}).close()  # of one storage, side by side
