"""What people write into parameters: between steps, and inside `gathered(write=True)`.

Most rows come in pairs from EDITS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from idioms import nets
from idioms.table import Group, Outcome, either, raises, refused

rows = Group("Edits of parameters")
ONE = (1,)
FP32 = ("fp32",)

Edit = Callable[[Any], Any]


def clamp(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.15, 0.15)


def scale_data(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def scale_detached(model: Any) -> None:
    for p in model.parameters():
        p.detach().mul_(0.5)


def new_data(model: Any) -> None:
    for p in model.parameters():
        p.data = nets.ramp(p)


def new_data_of_one(model: Any) -> None:
    model.leave.weight.data = model.leave.weight.data * 0.5


def copy_in(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.copy_(torch.full((16, 8), 0.25))


def load(model: Any) -> None:
    other = nets.models.fill(nets.Net(), seed=8)
    model.load_state_dict(other.state_dict())


def load_part(model: Any) -> None:
    other = nets.models.fill(nets.Net(), seed=8).state_dict()
    part = {name: value for name, value in other.items() if name.startswith("blocks.1.")}
    assert not model.load_state_dict(part, strict=False).unexpected_keys


def max_norm(model: Any) -> None:
    with torch.no_grad():
        weight = model.enter.weight
        weight.copy_(torch.renorm(weight, 2, 0, 0.2))


def mask(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_((p.abs() > 0.05).to(p.dtype))


def by_vector(model: Any) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() * 0.75, model.parameters())


def initialise(model: Any) -> None:
    torch.manual_seed(2)
    nn.init.xavier_uniform_(model.blocks[1].up.weight)
    nn.init.zeros_(model.leave.bias)


def apply_function(model: Any) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.125)

    model.apply(fill)


def reset(model: Any) -> None:
    torch.manual_seed(2)
    model.leave.reset_parameters()
    model.blocks[0].norm.reset_parameters()


def item(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight[3, 2] = 0.5
        model.enter.bias[1:3] = -0.25


def strided(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].down.weight.view(-1)[::2].zero_()


def foreach(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def lerp(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.lerp_(torch.zeros_like(p), 0.25)


def out_argument(model: Any) -> None:
    with torch.no_grad():
        weight = model.enter.weight
        torch.mul(weight, 0.5, out=weight)


def inference(model: Any) -> None:
    with torch.inference_mode():
        model.blocks[2].up.bias.fill_(0.25)


def swap_and_back(model: Any) -> None:
    with torch.no_grad():
        saved = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()
        for p, value in zip(model.parameters(), saved, strict=True):
            p.copy_(value)


def module_by_module(model: Any) -> None:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.25)


def merge(model: Any) -> None:
    """A low-rank product, as adapters are merged."""
    up, down = torch.full((16, 2), 0.25), torch.full((2, 8), 0.125)
    model.blocks[1].up.weight.data += (up @ down).to(model.blocks[1].up.weight.dtype)


def prune_in_place(model: Any) -> None:
    with torch.no_grad():
        weight = model.blocks[1].up.weight
        weight[weight.abs() < weight.abs().median()] = 0.0


def renormed_rows(model: Any) -> None:
    weight = model.blocks[0].up.weight
    weight.data = nn.functional.normalize(weight.data, dim=1)


def numpy_edit(model: Any) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= 0.5


EDITS: dict[str, tuple[Edit, dict[str, Any]]] = {
    "`p.clamp_` (weight clipping)": (clamp, {}),
    "`p.data.mul_`": (scale_data, {}),
    "`p.detach().mul_`": (scale_detached, {}),
    "`p.data = x` for every parameter": (new_data, {"sharded": Outcome("as torch")}),
    "`p.data = p.data * x` for one parameter": (new_data_of_one, {}),
    "`p.copy_`": (copy_in, {}),
    "`model.load_state_dict`": (load, {}),
    "`load_state_dict(strict=False)` of a part": (load_part, {}),
    "a max-norm constraint": (max_norm, {}),
    "magnitude pruning with a mask": (mask, {}),
    "`parameters_to_vector` and `vector_to_parameters`": (by_vector, {}),
    "`nn.init` functions": (initialise, {}),
    "`model.apply(function)`": (apply_function, {}),
    "`reset_parameters`": (reset, {}),
    "`p[i, j] = x` and `p[i:j] = x`": (item, {}),
    "`p.view(-1)[::2].zero_()`": (strided, {}),
    "`torch._foreach_mul_` on all parameters": (foreach, {}),
    "`p.lerp_`": (lerp, {}),
    "`out=p`": (out_argument, {}),
    "`p.fill_` in inference mode": (inference, {}),
    "weights swapped out and back": (swap_and_back, {}),
    "norms' weights set, module by module": (module_by_module, {}),
    "a low-rank product added: adapters merged": (merge, {}),
    "the smaller half of a weight zeroed": (prune_in_place, {}),
    "`p.data = normalize(p.data)`": (renormed_rows, {}),
    "`p.detach().numpy()[...] *= x`": (numpy_edit, {"precision": FP32}),
}


def between_steps(edit: Edit) -> Callable[[Any], None]:
    def body(t: Any) -> None:
        t.start()
        t.train(2)
        edit(t.model)
        t.train(2, start=2)

    return body


def in_gathered(edit: Edit) -> Callable[[Any], None]:
    def body(t: Any) -> None:
        t.start()
        t.train(2)
        with t.engine.gathered(write=True):
            edit(t.model)
        t.train(2, start=2)

    return body


for _title, (_edit, _only) in EDITS.items():
    _sharded = {"sharded": refused("gathered")} | _only
    rows(f"{_title} between steps", **_sharded)(between_steps(_edit))
    _rest = {key: value for key, value in _only.items() if key != "sharded"}
    rows(f"{_title} inside `gathered(write=True)`", **_rest)(in_gathered(_edit))


# ---- when and where


@rows("an edit before `initialize`")
def before(t: Any) -> None:
    model = nets.build()
    clamp(model)
    t.start(model)
    t.train(2)


@rows("an edit before the first step", sharded=refused("gathered"))
def before_first(t: Any) -> None:
    t.start()
    clamp(t.model)
    t.train(2)


@rows("an edit after the last step counts in `state_dict()`", sharded=refused("gathered"))
def after_last(t: Any) -> None:
    t.start()
    t.train(2)
    clamp(t.model)


@rows("an edit after the last step is in the model after `close()`", sharded=refused("gathered"))
def before_close(t: Any) -> None:
    t.start()
    t.train(2)
    clamp(t.model)
    t.close()


@rows("an edit between backward and step", sharded=refused("gathered"))
def before_step(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        copy_in(t.model)
        t.engine.step()


@rows("an edit between backward and step, inside `gathered(write=True)`")
def gathered_before_step(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        t.engine.backward(t.loss(step))
        with t.engine.gathered(write=True):
            copy_in(t.model)
        t.engine.step()


@rows("an edit between forward and backward", raises("modified by an inplace"), sharded=raises())
def before_backward(t: Any) -> None:
    t.start()
    loss = t.loss(0)
    with torch.no_grad():
        t.model.blocks[1].up.weight.mul_(0.5)
    t.engine.backward(loss)


@rows("an edit without `no_grad`", raises("leaf Variable"))
def without_no_grad(t: Any) -> None:
    t.start()
    with t.engine.gathered(write=True):
        t.model.enter.weight.mul_(0.5)


@rows("an edit of one element in every step", sharded=refused("gathered"))
def each_step(t: Any) -> None:
    t.start()
    for step in t.steps(4):
        t.engine.backward(t.loss(step))
        t.engine.step()
        with torch.no_grad():
            t.model.leave.weight[0, 0] = 0.25


@rows("an edit inside `gathered()` without `write`", sharded=refused("write"))
def read_only(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered():
        clamp(t.model)
    t.train(2, start=1)


@rows("an edit on rank 0 alone, inside `gathered(write=True)`")
def on_rank_0(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True):
        if t.rank == 0:
            clamp(t.model)
    t.train(2, start=1)


@rows("an edit of one gathered parameter: `gathered([p], write=True)`")
def one_gathered(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered([t.model.blocks[1].up.weight], write=True):
        copy_in(t.model)
    t.train(2, start=1)


@rows("a block's weights clamped in its forward, under `no_grad`", sharded=refused("gathered"))
def in_forward(t: Any) -> None:
    t.start()

    def clamped(module: Any, _inputs: Any) -> None:
        with torch.no_grad():
            module.up.weight.clamp_(-0.1, 0.1)

    t.model.blocks[1].register_forward_pre_hook(clamped)
    t.train(3)


@rows("an edit of a frozen parameter", sharded=refused("gathered"))
def frozen(t: Any) -> None:
    model = nets.build()
    model.blocks[1].requires_grad_(False)
    t.start(model)
    t.train(1)
    copy_in(model)
    t.train(2, start=1)


@rows("an edit of a frozen parameter inside `gathered(write=True)`")
def frozen_gathered(t: Any) -> None:
    model = nets.build()
    model.blocks[1].requires_grad_(False)
    t.start(model)
    t.train(1)
    with t.engine.gathered(write=True):
        copy_in(model)
    t.train(2, start=1)


@rows("an edit that is undone by the next `load_state_dict`", sharded=refused("gathered"))
def load_twice(t: Any) -> None:
    t.start()
    t.train(1)
    saved = {name: value.clone() for name, value in t.model.state_dict().items()}
    clamp(t.model)
    t.train(1, start=1)
    t.model.load_state_dict(saved)
    t.train(1, start=2)


@rows("a view taken after `initialize`, written to later", sharded=refused("gathered"))
def view_after(t: Any) -> None:
    t.start()
    view = t.model.leave.weight.detach().view(-1)
    t.train(1)
    view.mul_(0.5)
    t.train(2, start=1)


@rows("a view taken before `initialize`, written to later", either())
def view_before(t: Any) -> None:
    model = nets.build()
    view = model.leave.weight.detach().view(-1)
    t.start(model)
    t.train(1)
    view.mul_(0.5)
    t.train(2, start=1)


# ---- inside gathered(write=True)


@rows("a forward inside `gathered(write=True)`, after the edit")
def forward_inside(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True):
        scale_data(t.model)
        with torch.no_grad():
            t.loss(5)
    t.train(2, start=1)


@rows("averaged weights swapped in, evaluated and swapped out in one `gathered(write=True)`")
def swapped_inside(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True), torch.no_grad():
        saved = [p.clone() for p in t.model.parameters()]
        for p in t.model.parameters():
            p.mul_(0.5)
        t.loss(5)
        for p, value in zip(t.model.parameters(), saved, strict=True):
            p.copy_(value)
    t.train(2, start=1)


@rows("a nested `gathered()` inside `gathered(write=True)`")
def nested(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True):
        scale_data(t.model)
        with t.engine.gathered():
            seen = [p.float().sum() for p in t.model.parameters()]
        scale_data(t.model)
    t.train(1, start=1)
    return {"seen": seen}


@rows("two nested `gathered(write=True)`")
def nested_writes(t: Any) -> None:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True):
        scale_data(t.model)
        with t.engine.gathered(list(t.model.leave.parameters()), write=True):
            scale_data(t.model.leave)
    t.train(2, start=1)


@rows("forward and backward inside `gathered()`, the step outside")
def backward_inside(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        with t.engine.gathered():
            t.engine.backward(t.loss(step))
        t.engine.step()


@rows("`step()` inside `gathered()`", sharded=refused("gathered"), alone=either(), accumulate=ONE)
def step_inside(t: Any) -> None:
    t.start()
    for step in range(2):
        t.engine.backward(t.loss(step))
        with t.engine.gathered():
            t.engine.step()


@rows("`state_dict()` inside `gathered(write=True)`, after the edit", sharded=either())
def state_inside(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    with t.engine.gathered(write=True):
        scale_data(t.model)
        state = t.engine.state_dict()
    total = sum(float(value.sum()) for value in state.values())
    t.train(1, start=1)
    return {"sum": total * t.world}


@rows("an exception inside `gathered(write=True)`: the edit is dropped, or counts", either())
def exception_inside(t: Any) -> None:
    t.start()
    t.train(1)
    try:
        with t.engine.gathered(write=True):
            t.model.leave.weight.data.mul_(1.0)
            raise ValueError("of the user")
    except ValueError:
        pass
    t.train(2, start=1)


# ---- reading


@rows("`p.norm()` between steps", sharded=refused("gathered"))
def read_norm(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    return {"norms": [p.detach().float().norm() for p in t.model.parameters()]}


@rows("`p.norm()` inside `gathered()`")
def gathered_norm(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    with t.engine.gathered():
        return {"norms": [p.detach().float().norm() for p in t.model.parameters()]}


@rows("`p.tolist()`, `p.item()`, `p.sum().item()` between steps", sharded=refused("gathered"))
def read_items(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    bias = t.model.leave.bias
    return {"seen": [bias.tolist(), bias.item(), bias.sum().item(), float(bias)]}


@rows("`print(p)` and `print(model)` between steps", sharded=either())
def printed(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    return {"model": "LayerNorm" in repr(t.model), "p": "Parameter" in repr(t.model.enter.weight)}


@rows("`parameters_to_vector` for a log", sharded=refused("gathered"))
def read_vector(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    return {"vector": parameters_to_vector(t.model.parameters())}


@rows("an L2 penalty of all parameters in the loss", sharded=refused("gathered"))
def l2_penalty(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        penalty = sum(p.float().pow(2).sum() for p in t.model.parameters())
        t.engine.backward(t.loss(step) + 0.01 * penalty)
        t.engine.step()


@rows("an L1 penalty of one weight in the loss", sharded=either())
def l1_penalty(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        penalty = t.model.leave.weight.float().abs().sum()
        t.engine.backward(t.loss(step) + 0.01 * penalty)
        t.engine.step()


@rows("`model.state_dict()` between steps", sharded=refused("gathered"))
def state_between(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    return {name: value.float().sum() for name, value in t.model.state_dict().items()}


@rows("`model.state_dict()` inside `gathered()`")
def state_gathered(t: Any) -> dict[str, Any]:
    t.start()
    t.train(2)
    with t.engine.gathered():
        return {name: value.float().sum() for name, value in t.model.state_dict().items()}
