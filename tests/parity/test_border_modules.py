"""At the border with users' code: who calls the model, what is copied of it, what is put into it,
and the optimizer object. See test_border.py.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import copy
import gc
import io
import pickle

import models
import pytest
import torch
import torch.distributed as dist
from test_border import FEATURES, SGD, Net, assert_close, build, data, loss_of, mine, plain, start
from torch import nn

every_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])


# ---- who calls the model

CALLS = {
    "engine": lambda engine, x: engine(x),
    "module": lambda engine, x: engine.module(x),
    "forward": lambda engine, x: engine.module.forward(x),
}


def the_model_itself_is_called(strategy, how):
    engine = start(strategy)
    for step in range(3):
        x, y = mine(step)
        with torch.no_grad():
            CALLS[how](engine, x)
        engine.backward(((CALLS[how](engine, x) - y) ** 2).mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    assert "forward" not in engine.module.__dict__
    return state


@pytest.mark.parametrize("how", CALLS)
@every_strategy
def test_the_model_itself_is_called(strategy, how, pools):
    state = pools(2).run(the_model_itself_is_called, strategy, how)[0]
    assert_close(state, plain([0, 1, 2]))


def modules_are_called_alone(strategy):
    """An encoder and a head, each by itself, then one block."""
    engine = start(strategy)
    model = engine.module
    for step in range(3):
        x, y = mine(step)
        hidden = model.blocks(model.lift(x))
        engine.backward(((model.leave(hidden).squeeze(-1) - y) ** 2).mean())
        engine.step()
    with torch.no_grad():
        one = model.blocks[1](torch.ones(2, model.lift.out_features))
    state = engine.state_dict()
    engine.close()
    return state, one


@every_strategy
def test_modules_are_called_alone(strategy, pools):
    state, one = pools(2).run(modules_are_called_alone, strategy)[0]
    expected = plain([0, 1, 2])
    assert_close(state, expected)
    model = build()
    model.load_state_dict(expected)
    with torch.no_grad():
        assert torch.allclose(one, model.blocks[1](torch.ones(2, model.lift.out_features)))


class Talks(Net):
    """Generates as many numbers as it is told."""

    def generate(self, x: torch.Tensor, count: int) -> list[float]:
        said = []
        for _ in range(count):
            x = x + self(x).mean()
            said.append(float(x.mean()))
        return said


def ranks_generate_different_lengths(strategy, how):
    model = models.fill(Talks())
    engine = start(strategy, model=model)
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()
    said = []
    for lengths in ((1, 4), (3, 0)):
        owner = engine if how == "engine" else model
        with torch.no_grad():
            said.append(owner.generate(torch.ones(1, FEATURES), lengths[dist.get_rank()]))
    engine.backward(loss_of(engine, *mine(1)))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return said, state


@pytest.mark.parametrize("how", ["engine", "model"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ranks_generate_different_lengths(strategy, how, pools):
    outcome = pools(2).run(ranks_generate_different_lengths, strategy, how)
    model = models.fill(Talks())
    model.load_state_dict(plain([0]))
    for rank, lengths in enumerate(((1, 3), (4, 0))):
        with torch.no_grad():
            expected = [model.generate(torch.ones(1, FEATURES), n) for n in lengths]
        assert [pytest.approx(e, rel=1e-4) for e in expected] == outcome[rank][0]
    assert_close(outcome[0][1], plain([0, 1]))


# ---- copies of it


def copies_are_plain_models(strategy, recompute, how):
    engine = start(strategy, activations={"checkpoint": recompute})
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()
    with engine.gathered():
        if how == "deepcopy":
            other = copy.deepcopy(engine.module)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(engine.module))
        else:
            buffer = io.BytesIO()
            torch.save(engine.module, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
    if dist.get_rank() == 0:  # alone, and trained apart
        optimizer = torch.optim.SGD(other.parameters(), lr=SGD["lr"])
        loss_of(other, *data(1)).backward()
        optimizer.step()
    engine.backward(loss_of(engine, *mine(2)))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return {name: value.detach() for name, value in other.state_dict().items()}, state


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("recompute", ["none", "unit"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_copies_are_plain_models(strategy, recompute, how, pools):
    (first, state), (second, _) = pools(2).run(copies_are_plain_models, strategy, recompute, how)
    assert_close(first, plain([0, 1]))
    assert_close(second, plain([0]))
    assert_close(state, plain([0, 2]))


# ---- what is put into it


def _new_layer(model):
    model.leave = nn.Linear(model.leave.in_features, 1)


def _assigned(model):
    state = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("how", [_new_layer, _assigned])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_parameter_that_came_later_is_an_error(strategy, how):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(build(), {"strategy": strategy, "optimizer": SGD})
    how(engine.module)
    with pytest.raises(penstock.RuntimeFault, match="was added after initialize"):
        engine(data(0)[0])
    engine.close()


def test_a_module_in_two_engines_is_an_error():
    import penstock  # noqa: PLC0415

    shared = nn.Linear(4, 4)
    first = penstock.initialize(nn.Sequential(shared, nn.Linear(4, 1)), {"strategy": "ddp"})
    for model in (first.module, nn.Sequential(shared, nn.Linear(4, 2))):
        with pytest.raises(penstock.ConfigError, match=r'"0.weight" is already in another engine'):
            penstock.initialize(model, {"strategy": "ddp"})
    first.close()
    penstock.initialize(nn.Sequential(shared, nn.Linear(4, 2)), {"strategy": "ddp"}).close()


def weights_are_tied_later(strategy):
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))
    models.fill(model)
    engine = start(strategy, model=model, units={"modules": ["Linear"]})
    for step in range(4):
        if step == 2:
            model[2].weight = model[0].weight
        x, _ = mine(step)
        engine.backward((engine(x) ** 2).mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_weights_are_tied_later(strategy, pools):
    state = pools(2).run(weights_are_tied_later, strategy)[0]
    model = models.fill(nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for step in range(4):
        if step == 2:
            model[2].weight = model[0].weight
        optimizer.zero_grad()
        (model(data(step)[0]) ** 2).mean().backward()
        optimizer.step()
    assert_close(state, model.state_dict())


# ---- the optimizer object

TOUCHES = {
    "step": (lambda optimizer: optimizer.step(), "engine.step()"),
    "state": (lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]], "sharded"),
    "clear": (lambda optimizer: optimizer.state.clear(), "sharded"),
    "len": (lambda optimizer: len(optimizer.state), "sharded"),
    "state_dict": (lambda optimizer: optimizer.state_dict(), "sharded"),
    "load": (lambda optimizer: optimizer.load_state_dict({}), "sharded"),
}


@pytest.mark.parametrize("how", TOUCHES)
def test_a_touched_optimizer_is_an_error(how):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(build(), {"strategy": "zero2"})
    engine.backward(loss_of(engine, *data(0)))
    touch, words = TOUCHES[how]
    with pytest.raises(penstock.RuntimeFault, match=words.replace("(", r"\(").replace(")", r"\)")):
        touch(engine.optimizer)
    engine.step()
    engine.close()


@pytest.mark.parametrize("native", [True, False])
def test_hooks_of_the_optimizer_run(native):
    import penstock  # noqa: PLC0415

    model, seen = build(), []
    kind = torch.optim.SGD if native else torch.optim.NAdam
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    engine = penstock.initialize(model, {"strategy": "ddp"}, optimizer=optimizer)
    seen.clear()
    engine.backward(loss_of(engine, *data(0)))
    engine.step()
    assert seen == ["before", "after"]
    engine.close()


def test_a_parameter_that_is_not_the_models_is_an_error():
    import penstock  # noqa: PLC0415

    model, temperature = build(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(penstock.ConfigError, match="that is not in the model"):
        penstock.initialize(model, {"strategy": "ddp"}, optimizer=optimizer)
    engine = penstock.initialize(model, {"strategy": "ddp", "optimizer": SGD})
    engine.optimizer.add_param_group({"params": [temperature]})
    engine.backward(loss_of(engine, *data(0)))
    with pytest.raises(penstock.ConfigError, match="that is not in the model"):
        engine.step()
    engine.optimizer = optimizer
    with pytest.raises(penstock.RuntimeFault, match="keeps the optimizer"):
        engine.step()
    engine.close()


class NormOfAll(torch.optim.SGD):
    """Divides by the norm of all gradients it sees."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.grad /= norm
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_parameters_is_refused():
    import penstock  # noqa: PLC0415

    model = build()
    optimizer = NormOfAll(model.parameters(), lr=0.1)
    with pytest.raises(penstock.ConfigError, match="depends on the others"):
        penstock.initialize(model, {"strategy": "ddp"}, optimizer=optimizer)


class OnMatrices(torch.optim.SGD):
    """Takes nothing but matrices, as Muon, and says so without a text."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.dim() != 2 for p in group["params"]):
                raise AssertionError
        return super().step(closure)


def test_an_error_of_an_optimizer_without_a_text_names_its_place():
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = OnMatrices(model.parameters(), lr=0.1)
    with pytest.raises(
        penstock.ConfigError,
        match=r"AssertionError in step\(\), test_border_modules.py:\d+: raise AssertionError",
    ):
        config = {"strategy": "ddp", "optimizer": {"layout": "flat"}}
        penstock.initialize(model, config, optimizer=optimizer)


class Unequal(Net):
    """Rank 1 runs its layers another number of times."""

    def forward(self, features):
        x = self.lift(features)
        for _ in range(1 + 2 * dist.get_rank()):
            x = self.blocks(x)
        return self.leave(x).squeeze(-1)


def units_that_ranks_run_unequally():
    comm = {"timeout_s": 3, "bucket_bytes": 0}
    model = models.fill(Unequal())
    engine = start("zero3", model=model, comm=comm, units={"modules": ["Linear"]})
    try:
        engine.backward(loss_of(engine, *mine(0)))
        engine.step()
    finally:
        engine.close(gather=False)


def test_units_that_ranks_run_unequally(pools):
    outcomes = pools(2).attempt(units_that_ranks_run_unequally, timeout=180)
    for one in outcomes:
        assert one.is_a("RuntimeFault"), one.trace
        assert '"units.modules"' in one.text and '"units.layer_bytes"' in one.text, one.text


def test_a_scheduler_that_needs_a_metric_is_the_users():
    import penstock  # noqa: PLC0415

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    engine = penstock.initialize(
        build(), {"strategy": "ddp", "optimizer": SGD}, lr_scheduler=plateau
    )
    for _ in range(3):
        engine.backward(loss_of(engine, *data(0)))
        engine.step()
        engine.lr_scheduler.step(1.0)
    assert engine.lr == SGD["lr"] / 4
    engine.close()


def test_a_scheduler_that_raises_leaves_the_model_alone():
    import penstock  # noqa: PLC0415

    def broken(_optimizer):
        raise ZeroDivisionError

    model = build()
    with pytest.raises(ZeroDivisionError):
        penstock.initialize(model, {"strategy": "zero3"}, lr_scheduler=broken)
    assert_close(model.state_dict(), build().state_dict())


# ---- outputs


class Slotted:
    __slots__ = ("hidden", "loss", "me")


class Returns(Net):
    def forward(self, x):
        out = Slotted()
        out.hidden, out.me = super().forward(x), out  # a cycle
        return out


def outputs_with_slots_and_cycles(strategy):
    engine = start(strategy, model=models.fill(Returns()))
    for step in range(2):
        x, y = mine(step)
        engine.backward(((engine(x).hidden - y) ** 2).mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_outputs_with_slots_and_cycles(strategy, pools):
    assert_close(pools(2).run(outputs_with_slots_and_cycles, strategy)[0], plain([0, 1]))


def test_an_engine_is_collected():
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(build(), {"strategy": "zero3"})
    engine(data(0)[0])
    gone = []
    import weakref  # noqa: PLC0415

    weakref.finalize(engine, gone.append, True)
    engine.close()
    del engine
    gc.collect()
    assert gone == [True]
