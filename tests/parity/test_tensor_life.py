"""Ordinary things that people do around an engine whose ranks compute one model together: what
plain torch gives, or an error at that moment."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import tensor_models
import torch
import zoo
from tensor_models import Parts
from torch import nn

pytestmark = pytest.mark.timeout(180)
LIMIT = 1e-5
STRATEGIES = ["ddp", "zero2", "zero3"]
BATCHES = [batch for batch in zoo.batches("parts", 2)][:6]


def build(**options: Any) -> nn.Module:
    from models import fill  # noqa: PLC0415

    return fill(Parts(**options))


def start(model: nn.Module, strategy: str, tensor: int = 2, **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    settings = {
        "strategy": strategy,
        "mesh": {"tensor": tensor},
        "parallel": {"rules": tensor_models.rules(tensor)},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "comm": {"timeout_s": 20},
    }
    return penstock.initialize(model, settings | config)


class Plain:
    """An engine's calls in plain torch, on the same batch as its tensor ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.accumulate = model, 1
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()

    def step(self, force: bool = False) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    @contextlib.contextmanager
    def gathered(self, *_: Any, **__: Any) -> Any:
        yield

    def full_grads(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}

    def set_grads(self, given: dict[str, torch.Tensor]) -> None:
        for name, value in given.items():
            self.module.get_parameter(name).grad = value.clone()

    def state_dict(self, **_: Any) -> Any:
        return self.module.state_dict()

    def close(self) -> None:
        pass


def apart(ours: Any, theirs: Any) -> float:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in theirs)


def told(engine: Any, story: Any) -> Any:
    said = story(engine)
    weights = {n: v.clone() for n, v in engine.state_dict(rank0_only=False).items()}
    engine.close()
    left = {n: p.detach().clone() for n, p in engine.module.state_dict().items()}
    return {"weights": weights, "left": left, "said": said}


def compared(story: Any, strategy: str, tensor: int, config: Any) -> dict[str, float]:
    ours = told(start(build(), strategy, tensor, **config), story)
    theirs = told(Plain(build()), story)
    return {name: apart(ours[name], theirs[name]) for name in theirs}


def one_step(engine: Any, index: int = 0) -> float:
    loss = engine(*BATCHES[index])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def losses(*values: float) -> dict[str, torch.Tensor]:
    return {str(i): torch.tensor(value) for i, value in enumerate(values)}


# ---- stories, which plain torch tells alike


def reads_gathered(engine):
    first = one_step(engine)
    with engine.gathered():
        seen = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        copied = copy.deepcopy(engine.module)
    return seen | losses(first, float(copied(*BATCHES[1]).detach()), one_step(engine, 1))


def writes_gathered(engine):
    first = one_step(engine)
    with engine.gathered(write=True), torch.no_grad():
        engine.module.blocks[0].qkv.weight.mul_(1.1)
        engine.module.tokens.weight[3].zero_()
        engine.module.blocks[1].down.weight.data.add_(0.01)
    return losses(first, one_step(engine, 1), one_step(engine, 2))


def writes_some_nested(engine):
    weight = engine.module.blocks[0].attention.out.weight
    with engine.gathered([weight]), engine.gathered([weight], write=True), torch.no_grad():
        weight.mul_(1.5)
    return losses(one_step(engine), one_step(engine, 1))


def changes_gradients(engine):
    engine.backward(engine(*BATCHES[0]))
    grads = engine.full_grads()
    engine.set_grads({name: value * 0.5 for name, value in grads.items()})
    again = engine.full_grads()
    engine.step()
    return grads | {f"{name} again": value for name, value in again.items()}


def window_of(engine, count):
    """Batches of a window, which plain torch averages over by hand."""
    if isinstance(engine, Plain):
        engine.accumulate = count
    for index in range(count):
        engine.backward(engine(*BATCHES[index]))


def forces_a_step(engine):
    window_of(engine, 2)
    engine.step(force=True)  # two of three
    window_of(engine, 3)
    engine.step()
    return losses(float(engine(*BATCHES[3])))


def two_backwards(engine):
    """Two forwards whose gradients come one after the other, and a part of the model alone."""
    engine.backward(engine(*BATCHES[0]) + engine(*BATCHES[1]))
    engine.backward(engine(*BATCHES[2]))
    engine.step()
    return losses(one_step(engine, 3))


def penalizes(engine):
    """torch.autograd.grad inside a step."""
    loss = engine(*BATCHES[0])
    torch.autograd.grad(loss, [engine.module.blocks[0].norms[1].weight], retain_graph=True)
    engine.backward(loss)
    engine.step()
    return losses(one_step(engine, 1))


def freezes(engine):
    one_step(engine)
    for name in ("key_norm", "key", "out"):
        getattr(engine.module.blocks[1].attention, name).requires_grad_(False)
    second = one_step(engine, 1)
    engine.module.blocks[1].attention.key_norm.requires_grad_(True)
    return losses(second, one_step(engine, 2))


def evaluates(engine):
    one_step(engine)
    engine.module.eval()
    with torch.no_grad():
        seen = float(engine(*BATCHES[4]))
    engine.module.train()
    return losses(seen, one_step(engine, 1))


def raises_in_between(engine):
    """A forward that raises on every rank, and one that nobody goes back from."""
    one_step(engine)
    with contextlib.suppress(IndexError):
        engine(torch.full_like(BATCHES[0][0], 1000), BATCHES[0][1])
    engine(*BATCHES[1])
    return losses(one_step(engine, 2))


STORIES = [
    (reads_gathered, {}),
    (writes_gathered, {}),
    (writes_some_nested, {}),
    (changes_gradients, {}),
    (forces_a_step, {"batch": {"accumulate": 3}}),
    (two_backwards, {"batch": {"reduction": "sum", "accumulate": 1}}),
    (penalizes, {}),
    (freezes, {}),
    (evaluates, {}),
    (raises_in_between, {}),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("story", "config"), STORIES, ids=lambda v: getattr(v, "__name__", ""))
def test_story(story, config, strategy, pools):
    for found in pools(2).run(compared, story, strategy, 2, config):
        assert all(value <= LIMIT for value in found.values()), found
