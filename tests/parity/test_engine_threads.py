"""Two threads and one engine: a call that would overlap with another thread's is refused; calls in
turn train like plain torch."""

from __future__ import annotations

import threading
from typing import Any

import models
import pytest
import torch
from torch import nn

import penstock

LIMIT = 60  # s; a thread that waits for another


class Gate:
    """Holds the thread that passes it, until the test has made its call in another thread."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.closed = ""

    def at(self, place: str) -> None:
        if self.closed == place:
            self.closed = ""
            self.reached.set()
            assert self.go_on.wait(LIMIT)


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        gate.at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.gate.at("backward")
        return grad, None


class Net(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(Held.apply(x, self.gate)).sum()


class Sgd(torch.optim.SGD):
    gate: Gate

    def step(self, closure: Any = None) -> Any:
        if "gate" in vars(self):
            self.gate.at("step")
        return super().step(closure)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def in_thread(name: str, call: Any) -> tuple[threading.Thread, list[Any]]:
    """Starts `call`; the list gets its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread, found


def trained(engine: Any) -> torch.Tensor:
    loss = engine(X)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def evaluated(engine: Any, _loss: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return engine(X)


# What the other thread calls, with a loss that the first thread has computed before.
CALLS = {
    "forward": evaluated,
    "part": lambda engine, _: engine.module.leave(X),
    "block": lambda engine, _: engine.module.blocks[0](X),
    "backward": lambda engine, loss: engine.backward(loss),
    "loss.backward()": lambda _, loss: loss.backward(),
    "step": lambda engine, _: engine.step(),
}
CASES = [
    *((place, call) for place in ("forward", "backward", "step") for call in ("forward", "step")),
    ("forward", "backward"),
    ("backward", "backward"),
    ("forward", "loss.backward()"),
    ("step", "loss.backward()"),
]
# Where a rank has only its shards of the weights.
SHARDED = [
    *((place, call) for place in ("forward", "backward") for call in ("part", "block", "forward")),
    ("step", "forward"),
]


def start(strategy: str, gate: Gate) -> Any:
    model = models.fill(Net(gate))
    optimizer = Sgd(model.parameters(), lr=0.1)
    engine = penstock.initialize(model, {"strategy": strategy}, optimizer=optimizer)
    engine.optimizer.gate = gate
    return engine


def refused(strategy: str, place: str, call: str) -> str:
    """Returns the error of the second thread's call. The first thread's call ends as in torch."""
    gate = Gate()
    engine = start(strategy, gate)
    plain = models.fill(Net(Gate()))
    loss = engine(X)
    gate.closed = place
    trainer, found = in_thread("trainer", lambda: trained(engine))
    assert gate.reached.wait(LIMIT)
    watcher, error = in_thread("watcher", lambda: CALLS[call](engine, loss))
    watcher.join(LIMIT)
    gate.go_on.set()
    trainer.join(LIMIT)
    assert isinstance(error[0], RuntimeError), error
    assert isinstance(found[0], torch.Tensor), found
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    value = plain(X)
    value.backward()
    optimizer.step()
    torch.testing.assert_close(found[0], value.detach())
    for name, weight in engine.state_dict(rank0_only=False).items():
        torch.testing.assert_close(weight, plain.state_dict()[name])
    engine.close()
    return str(error[0])


def check_names(text: str, place: str) -> None:
    assert '"watcher"' in text and '"trainer"' in text and place in text, text


@pytest.mark.parametrize(
    ("strategy", "place", "call"),
    [(one, *case) for one in ("zero1", "zero3") for case in CASES],
)
def test_a_call_inside_another_threads_call_is_refused(strategy, place, call):
    check_names(refused(strategy, place, call), place)


@pytest.mark.parametrize(("place", "call"), SHARDED)
def test_a_call_on_two_ranks_is_refused(place, call, pools):
    for text in pools(2).run(refused, "zero3", place, call, timeout=4 * LIMIT):
        check_names(text, place)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_threads_in_turn(strategy):
    gate = Gate()
    engine = start(strategy, gate)
    plain = models.fill(Net(Gate()))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for name in ("first", "second", "third"):
        thread, found = in_thread(name, lambda: (trained(engine), evaluated(engine, X)))
        thread.join(LIMIT)
        value = plain(X)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found[0], (value.detach(), plain(X).detach()))
    engine.close()


class Stop(Exception):
    pass


def fails(engine: Any) -> None:
    loss = engine(X)
    loss.register_hook(lambda _: (_ for _ in ()).throw(Stop()))
    loss = loss * 1
    engine.backward(loss)


def fails_late(engine: Any) -> None:
    handle = engine.module.blocks[0].register_full_backward_hook(
        lambda *_: (_ for _ in ()).throw(Stop())
    )
    try:
        engine(X).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("failing", [fails, fails_late])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_thread_goes_on_after_another_failed(strategy, failing):
    """A forward or a backward that raised in one thread does not keep others out."""
    engine = start(strategy, Gate())
    thread, found = in_thread("first", lambda: failing(engine))
    thread.join(LIMIT)
    assert isinstance(found[0], Stop), found
    with pytest.raises(TypeError):
        engine(None)
    plain = models.fill(Net(Gate()))
    thread, found = in_thread("second", lambda: trained(engine))
    thread.join(LIMIT)
    torch.testing.assert_close(found[0], plain(X).detach())
    engine.close()
