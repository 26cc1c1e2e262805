"""At the border with users' code: one rank makes other calls than the rest, or raises alone. All
ranks end with an error within seconds, long before `comm.timeout_s`.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import time

import models
import pytest
import torch
import torch.distributed as dist
from test_border import Net, assert_close, build, mine, plain
from test_border import start as start_sgd

SOON = 30  # seconds; the ranks themselves would wait 50
COMM = {"timeout_s": 60}


def start(strategy, **others):
    import penstock  # noqa: PLC0415

    if "optimizer" not in others:
        return start_sgd(strategy, **others)
    model = others.pop("model")
    optimizer = others.pop("optimizer")
    return penstock.initialize(model, {"strategy": strategy} | others, optimizer=optimizer)


def ends_soon(go):
    """Returns the error that go() raises, or ""."""
    began = time.monotonic()
    said = ""
    try:
        go()
    except (RuntimeError, ValueError) as error:
        said = str(error)
    assert time.monotonic() - began < SOON
    return said


def loss_of(model, step):
    x, y = mine(step)
    return ((model(x) - y) ** 2).mean()


# ---- another number of micro-batches


def _forced(engine):
    engine.step(force=True)


def _closed(engine):
    engine.close()


def _read(engine):
    engine.full_grads()


def _state(engine):
    engine.state_dict()


def _gathered(engine):
    with engine.gathered():
        pass


ENDS = {
    "step": (_forced, "called step() in step 2 after 1 of 4 backwards"),
    "close": (_closed, "called close()"),
    "full_grads": (_read, "called full_grads()"),
    "state_dict": (_state, "began to gather the weights"),
    "gathered": (_gathered, "called gathered()"),
}


def uneven(strategy, transport, end, first):
    """Rank `first` runs one backward of four, the other rank two, and then both call `end`."""
    engine = start(strategy, batch={"accumulate": 4}, comm=COMM | {"backend": transport})
    for step in range(4):  # step one has plans of its own
        engine.backward(loss_of(engine, step))
    engine.step()

    def go():
        for step in range(1 if dist.get_rank() == first else 2):
            engine.backward(loss_of(engine, step))
        ENDS[end][0](engine)

    said = ends_soon(go)
    engine.close()
    return said


@pytest.mark.parametrize(
    ("transport", "end", "first"),
    [("shm", end, 0) for end in ENDS]
    + [("shm", "step", 1), ("gloo", "step", 0), ("gloo", "close", 1)],
)
def test_uneven(transport, end, first, pools):
    """Both ranks name both calls. close() gathers the weights, also after such an error."""
    outcome = pools(2).run(uneven, "zero3", transport, end, first, timeout=240)
    for rank, said in enumerate(outcome):
        if end == "close" and rank == first:
            assert said == ""  # it waited for the other rank to close, too
            continue
        assert f"rank {first} {ENDS[end][1]}" in said
        assert f"rank {1 - first} began a forward in step 2 after 1 of 4 backwards" in said


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_uneven_where_weights_are_whole(strategy, pools):
    for said in pools(2).run(uneven, strategy, "shm", "step", 0, timeout=240):
        assert "different numbers of backwards" in said


# ---- an error on one rank only


class Raises(Net):
    """Raises on rank 1 where `when` says."""

    when = ""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.lift(features)
        alone = dist.get_rank() == 1
        if self.when == "forward" and alone:
            raise ValueError("no such file")
        if self.when == "backward" and alone and x.requires_grad:
            x.register_hook(_raise)
        return self.leave(self.blocks(x)).squeeze(-1)


def _raise(*_):
    raise ValueError("no such file")


class Fails(torch.optim.SGD):
    """A user-defined optimizer whose step() fails on rank 1."""

    fails = False

    def step(self, closure=None):
        if self.fails and dist.get_rank() == 1:
            _raise()
        return super().step(closure)


def _trains(engine, step):
    engine.backward(loss_of(engine, step))
    engine.step()


def _model(when):
    def go(engine):
        engine.module.when = when
        _trains(engine, 1)

    return go


def _optimizer(engine):
    engine.optimizer.fails = True
    _trains(engine, 1)


def _groups(engine):
    engine.backward(loss_of(engine, 1))
    if dist.get_rank() == 1:
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    engine.step()


def _grads(engine):
    engine.backward(loss_of(engine, 1))
    grads = engine.full_grads()
    engine.set_grads({} if dist.get_rank() == 1 else grads)


def _dtype(engine):
    engine.state_dict(torch.int32 if dist.get_rank() == 1 else None)


def _argument(engine):
    engine.backward(loss_of(engine, 1) if dist.get_rank() == 0 else "loss")
    engine.step()


RAISED = {  # what happens; the strategies; what rank 1 did; its error
    "forward": (_model("forward"), ["zero3"], "left its forward of step 2", "no such file"),
    "backward": (_model("backward"), ["ddp", "zero3"], "left its backward of step 2", "such file"),
    "optimizer": (_optimizer, ["zero1"], "left its update of step 2", "no such file"),
    "groups": (_groups, ["zero3"], "called step(), which raised", "not in the model"),
    "dtype": (_dtype, ["zero3"], "called state_dict(), which raised", "torch.int32"),
    "argument": (_argument, ["zero1", "zero3"], "called backward(), which raised", "a str"),
}
"""Rank 1 alone: its model or optimizer raises, or the engine refuses its call."""


def raised(strategy, what):
    make = Fails if what == "optimizer" else torch.optim.SGD
    engine = start(
        strategy,
        model=models.fill(Raises()),
        comm=COMM,
        optimizer=lambda params: make(params, lr=0.5),
    )
    _trains(engine, 0)
    said = ends_soon(lambda: RAISED[what][0](engine))
    dist.barrier()  # rank 1 neither ends nor goes on
    engine.close()
    return said


@pytest.mark.parametrize(
    ("what", "strategy"), [(what, one) for what in RAISED for one in RAISED[what][1]]
)
def test_raised(what, strategy, pools):
    own, other = pools(2).run(raised, strategy, what, timeout=240)[::-1]
    _, _, did, error = RAISED[what]
    assert error in own
    assert f"rank 1 {did}" in other
    assert error in other
    assert "rank 0 raised no error and waits for rank 1 in `" in other


def caught(strategy, rank):
    """All ranks raise alike, and one of them takes its time before it goes on."""
    engine = start(strategy, model=models.fill(Alike()), comm=COMM)
    for step in range(4):
        engine.module.raises = step == 1
        try:
            loss = loss_of(engine, step)
        except ValueError:
            if dist.get_rank() == rank:
                time.sleep(3.5)
            continue
        if dist.get_rank() == rank and step == 2:
            time.sleep(3.5)  # it may also pause between a forward and a backward
        engine.backward(loss)
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


class Alike(Net):
    raises = False

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.lift(features))
        if self.raises:
            _raise()
        return self.leave(x).squeeze(-1)


@pytest.mark.parametrize("strategy", ["zero3"])
def test_caught(strategy, pools):
    assert_close(pools(2).run(caught, strategy, 1)[0], plain([0, 2, 3]))


# ---- initialize()


def _strategy(model):
    return model, {"strategy": "zero1" if dist.get_rank() == 0 else "zero9"}, None


def _no_model(model):
    return model if dist.get_rank() == 0 else "model", {}, None


def _builder(model):
    return model, {}, torch.optim.SGD(model.parameters(), 0.1) if dist.get_rank() == 0 else _raise


def _file(model):
    return model, {} if dist.get_rank() == 0 else "no/such/file.json", None


def _alike(model):
    return model, {"strategy": "zero9"}, None


BEGINS = {
    "strategy": (_strategy, '"strategy" is "zero9"'),
    "model": (_no_model, "must be an nn.Module"),
    "optimizer": (_builder, "no such file"),
    "file": (_file, "no/such/file.json"),
}


def begins(what):
    import penstock  # noqa: PLC0415

    make = _alike if what == "alike" else BEGINS[what][0]
    model, config, optimizer = make(build())
    said = ends_soon(lambda: penstock.initialize(model, config, optimizer=optimizer))
    engine = start("zero1")  # the ranks meet again
    _trains(engine, 0)
    engine.close()
    return said


@pytest.mark.parametrize("what", BEGINS)
def test_begins(what, pools):
    """Rank 1 alone cannot begin. Afterwards all ranks can."""
    other, own = pools(2).run(begins, what, timeout=240)
    assert BEGINS[what][1] in own
    assert "[front::initialize] rank 1, for which this rank waited, raised " in other
    assert BEGINS[what][1] in other


def test_begins_alike(pools):
    for said in pools(2).run(begins, "alike", timeout=240):
        assert said.startswith("[plan::Config::parse]")
