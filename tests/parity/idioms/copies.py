"""Copies of the model: deep copies, files, averages, teachers, and what is left after close()."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from idioms import nets
from idioms.table import SINCE_2_12, Group, either, refused
from idioms.trial import adamw

rows = Group("Copies and ends")
ONE = (1,)
X = torch.linspace(-1, 1, 12).view(2, 6)


def sums(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().float().sum() for p in model.parameters()]


# ---- deep copies


@rows("`copy.deepcopy(model)`, called and trained separately", sharded=refused("gathered"))
def deep(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    other = copy.deepcopy(t.model)
    t.train(1, start=1)
    outputs = [other(X).float()]
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    outputs[0].pow(2).mean().backward()
    own.step()
    outputs.append(other(X).float())
    t.train(1, start=2)
    return {"outputs": outputs}


@rows("`copy.deepcopy(model)` inside `gathered()`, called and trained separately")
def deep_gathered(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered():
        other = copy.deepcopy(t.model)
    t.train(1, start=1)
    outputs = [other(X).float()]
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    outputs[0].pow(2).mean().backward()
    own.step()
    outputs.append(other(X).float())
    t.train(1, start=2)
    return {"outputs": outputs}


@rows("`copy.deepcopy(block)`", sharded=refused("gathered"))
def deep_block(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    other = copy.deepcopy(t.model.blocks[1])
    t.train(1, start=1)
    return {"sums": sums(other)}


@rows("a deep copy made before `initialize`: a frozen teacher")
def teacher(t: Any) -> None:
    model = nets.build()
    frozen = copy.deepcopy(model).requires_grad_(False)
    t.start(model)
    for step in t.steps(3):
        x, _ = t.batch(step)
        gap = t.engine(x).float() - frozen(x)
        t.engine.backward(t.loss(step) + gap.pow(2).mean())
        t.engine.step()


@rows("`copy.deepcopy(engine)`", refused("engine"))
def deep_engine(t: Any) -> None:
    t.start()
    if not t.plain:
        copy.deepcopy(t.engine)


@rows("`pickle.dumps(engine)`", refused("engine"))
def pickle_engine(t: Any) -> None:
    t.start()
    if not t.plain:
        pickle.dumps(t.engine)


# ---- files


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@rows("`pickle` of the model", sharded=refused("gathered"))
def pickled(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    return {"sums": sums(pickle.loads(pickle.dumps(t.model)))}


@rows("`torch.save(model)` and `torch.load`", sharded=refused("gathered"))
def save_model(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    other = saved(t.model)
    t.train(1, start=1)
    return {"sums": sums(other), "output": other(X)}


@rows("`torch.save(model)` inside `gathered()`")
def save_model_gathered(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered():
        other = saved(t.model)
    t.train(1, start=1)
    return {"sums": sums(other), "output": other(X)}


@rows("`torch.save(model.state_dict())`", sharded=refused("gathered"))
def save_state(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    state = saved(t.model.state_dict())
    t.train(1, start=1)
    return {name: value.float().sum() for name, value in state.items()}


@rows("`torch.save(engine.state_dict())`, loaded into a plain model", world=ONE)
def save_engine_state(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    state = saved(t.engine.state_dict())
    t.train(1, start=1)
    other = nets.build()
    other.load_state_dict(state)
    return {"output": other(X)}


@rows("`torch.save(engine.module.state_dict())` every few steps, inside `gathered()`")
def save_often(t: Any) -> dict[str, Any]:
    t.start()
    seen = []
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            with t.engine.gathered():
                state = saved(t.engine.module.state_dict())
            seen.append([value.float().sum() for value in state.values()])
    return {"seen": seen}


class Hooked(nets.Net):
    """Extra state, and hooks of `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.register_state_dict_post_hook(self.drop)

    @staticmethod
    def drop(_module: nn.Module, state: Any, _prefix: str, _meta: Any) -> None:
        state.pop("leave.bias")

    def get_extra_state(self) -> Any:
        return {"loads": self.loads}

    def set_extra_state(self, state: Any) -> None:
        self.loads = state["loads"] + 1


@rows("`get_extra_state` and a `state_dict` hook")
def extra_state(t: Any) -> dict[str, Any]:
    t.start(nets.build(Hooked))
    t.train(2)
    state = t.engine.state_dict()
    if t.rank > 0:
        return {"found": [False, True]}
    return {"found": ["leave.bias" in state, state["_extra_state"] == {"loads": 0}]}


@rows("a `load_state_dict` pre-hook that renames keys, before `initialize`")
def renamed_keys(t: Any) -> None:
    model = nets.build()

    def rename(_module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith("old.")]:
            state[key.removeprefix("old.")] = state.pop(key)

    model.register_load_state_dict_pre_hook(rename)
    other = nets.models.fill(nets.Net(), seed=8)
    model.load_state_dict({f"old.{name}": value for name, value in other.state_dict().items()})
    t.start(model)
    t.train(2)


# ---- averages


def averaged(t: Any, **options: Any) -> dict[str, Any]:
    average = None
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            with t.engine.gathered():
                if average is None:
                    average = AveragedModel(t.model, **options)
                average.update_parameters(t.model)
    return {"average": sums(average.module), "output": average(X)}


@rows("SWA: `AveragedModel` and `update_parameters`, inside `gathered()`")
def swa(t: Any) -> dict[str, Any]:
    return averaged(t)


@rows("EMA: `AveragedModel` with `get_ema_multi_avg_fn`, inside `gathered()`")
def ema(t: Any) -> dict[str, Any]:
    return averaged(t, multi_avg_fn=get_ema_multi_avg_fn(0.5))


@rows("`AveragedModel` of the model between steps", sharded=refused("gathered"))
def swa_between(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    average = AveragedModel(t.model)
    average.update_parameters(t.model)
    t.train(1, start=1)
    average.update_parameters(t.model)
    return {"average": sums(average.module)}


# Before 2.12 torch's AveragedModel takes no average of another dtype than the model's.
@rows("`AveragedModel` made before `initialize`, updated inside `gathered()`", SINCE_2_12)
def swa_before(t: Any) -> dict[str, Any]:
    model = nets.build()
    average = AveragedModel(model)
    t.start(model)
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            with t.engine.gathered():
                average.update_parameters(t.model)
    return {"average": sums(average.module)}


@rows("averages by hand over `model.parameters()`", sharded=refused("gathered"))
def ema_by_hand(t: Any) -> dict[str, Any]:
    t.start()
    average = [p.detach().clone().float() for p in t.model.parameters()]
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        if t.engine.step():
            for kept, p in zip(average, t.model.parameters(), strict=True):
                kept.lerp_(p.detach().float(), 0.5)
    return {"average": average}


def swap(model: nn.Module, others: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        kept = [p.clone() for p in model.parameters()]
        for p, other in zip(model.parameters(), others, strict=True):
            p.copy_(other)
    return kept


@rows("averages swapped in for an evaluation and out again", sharded=refused("gathered"))
def ema_swap(t: Any) -> None:
    t.start()
    average = [0.5 * p.detach().clone() for p in t.model.parameters()]
    t.train(1)
    kept = swap(t.model, average)
    with torch.no_grad():
        t.loss(5)
    swap(t.model, kept)
    t.train(2, start=1)


@rows("averages swapped in and out, in two `gathered(write=True)`")
def ema_swap_gathered(t: Any) -> None:
    t.start()
    with t.engine.gathered():
        average = [0.5 * p.detach().clone() for p in t.model.parameters()]
    t.train(1)
    with t.engine.gathered(write=True):
        kept = swap(t.model, average)
    with torch.no_grad():
        t.loss(5)
    with t.engine.gathered(write=True):
        swap(t.model, kept)
    t.train(2, start=1)


@rows("averages swapped in as `p.data` and out again", sharded=either())
def ema_swap_data(t: Any) -> None:
    t.start()
    t.train(1)
    kept = {}
    for name, p in t.model.named_parameters():
        kept[name] = p.data
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)
    with torch.no_grad():
        t.loss(5)
    for name, p in t.model.named_parameters():
        p.data = kept[name]
    t.train(2, start=1)


@rows("a target network, loaded every second step inside `gathered()`")
def target_network(t: Any) -> None:
    model = nets.build()
    target = copy.deepcopy(model).requires_grad_(False)
    t.start(model)
    for step in t.steps(4):
        x, _ = t.batch(step)
        gap = t.engine(x).float() - 0.5 * target(x + 0.1).float()
        t.engine.backward(t.note(gap.pow(2).mean()))
        if t.engine.step() and step % 2:
            with t.engine.gathered():
                target.load_state_dict(t.model.state_dict())


@rows("the best weights kept, and loaded at the end inside `gathered(write=True)`")
def best_weights(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered():
        best = {name: value.clone() for name, value in t.model.state_dict().items()}
    t.train(2, start=1)
    with t.engine.gathered(write=True):
        t.model.load_state_dict(best)


# ---- ends


@rows("the model after `close()`: trained on by plain torch", accumulate=ONE)
def trained_on(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    t.close()
    own = torch.optim.SGD(t.model.parameters(), lr=0.05)
    output = t.model(X).float()
    output.pow(2).mean().backward()
    own.step()
    return {"output": output, "grads": [p.grad is not None for p in t.model.parameters()]}


@rows("a second `initialize` of the model after `close()`", accumulate=ONE)
def again(t: Any) -> None:
    t.start()
    t.train(2)
    t.close()
    if t.plain:  # what it computed in is what the masters begin with
        for p in t.model.parameters():
            p.data = p.data.float()
    t.start(t.model)
    t.train(2, start=2)
    t.engines.pop(0)
    t.starts.pop(0)


@rows("`initialize` twice on one model", refused("initialize"))
def twice(t: Any) -> None:
    model = nets.build()
    t.start(model)
    if not t.plain:
        t.start(model)
        t.train(1)


@rows("a module in two open engines", refused("initialize"))
def in_two(t: Any) -> None:
    first, second = nets.build(), nets.build()
    second.blocks[1] = first.blocks[1]
    t.start(first)
    if not t.plain:
        t.start(second)
        t.train(1)


@rows("one optimizer for two engines", refused())
def optimizer_in_two(t: Any) -> None:
    first, second = nets.build(), nets.build()
    optimizer = adamw([*first.parameters(), *second.parameters()])
    t.start(first, optimizer)
    if not t.plain:
        t.start(second, optimizer)
        t.train(1)


@rows("`close()` twice")
def close_twice(t: Any) -> None:
    t.start()
    t.train(1)
    t.close()
    t.close()


@rows("a call after `close()`", either())
def call_closed(t: Any) -> None:
    t.start()
    t.train(1)
    t.close()
    if not t.plain:
        t.engine.backward(t.engine(X).float().mean())
        t.engine.step()


@rows("tensors kept beyond `close()`: `state_dict()`, `p.detach()`, a view")
def kept(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered():
        held = [t.model.leave.weight.detach().clone()]
    t.close()
    held += [t.model.enter.weight.detach(), t.model.blocks[0].up.weight.view(-1)]
    held += list(t.model.state_dict().values())
    t.engines[:] = []
    t.starts[:] = []
    t.engine = None
    gc.collect()
    return {"held": [value.detach().float().sum() for value in held]}


@rows("views taken from an open engine, read after `close()`", sharded=either())
def views_kept(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    held = [t.model.enter.weight.detach(), t.model.blocks[0].up.weight.detach().view(-1)]
    held += list(t.model.state_dict().values())
    t.close()
    t.engines[:] = []
    t.engine = None
    gc.collect()
    junk = [torch.full((1000,), 7.0) for _ in range(200)]
    return {"held": [value.float().sum() for value in held], "junk": len(junk)}


@rows("an engine that is dropped without `close()`", sharded=either())
def dropped(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    model = t.model
    drop(t)
    return {"sums": sums(model)}


def drop(t: Any) -> None:
    """The engine ends by garbage collection; plain torch's is the model alone, too."""
    t.engine, t.engines[:] = None, []
    gc.collect()


@rows("an engine that is dropped without `close()`; the model evaluates under `no_grad`")
def dropped_evaluates(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    model = t.model
    drop(t)
    with torch.no_grad():
        return {"output": model(X).float()}


@rows("an engine that is dropped without `close()`; plain torch trains its model", refused("close"))
def dropped_trains(t: Any) -> None:
    t.start()
    t.train(1)
    model = t.model
    drop(t)
    features, targets = t.batch(1)
    ((model(features).float() - targets) ** 2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@rows("an engine that is dropped without `close()`; `initialize` again", refused("close"))
def dropped_again(t: Any) -> None:
    t.start()
    t.train(1)
    model = t.model
    drop(t)
    t.start(model)


@rows("an exception in the loss, then `close()` in `finally`", accumulate=ONE)
def finally_close(t: Any) -> None:
    t.start()
    try:
        t.train(2)
        t.loss(2)
        raise ValueError("of the user")
    except ValueError:
        t.close()


@rows("an exception in a block's forward, then `close()` in `finally`", accumulate=ONE)
def finally_forward(t: Any) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    t.start()
    t.train(2)
    t.model.blocks[1].register_forward_hook(fail)
    try:
        t.loss(2)
    except ValueError:
        t.close()


@rows("an exception in backward, then `close()` in `finally`", accumulate=ONE)
def finally_backward(t: Any) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the user")

    t.start()
    t.train(2)
    loss = t.loss(2, lambda x: t.engine(x).tanh())
    handle = t.model.blocks[1].up.weight.register_hook(fail)
    try:
        t.engine.backward(loss)
    except ValueError:
        handle.remove()
        t.close()


@rows("`close()` between backward and step")
def close_in_window(t: Any) -> None:
    t.start()
    t.train(2)
    t.engine.backward(t.loss(9))
    t.close()
