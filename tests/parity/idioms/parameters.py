"""Parameters as objects: freezing, moving, replacing, tying, and parameters of unusual kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from idioms import nets
from idioms.table import Group, either, raises, refused
from idioms.trial import adamw

rows = Group("Parameters as objects")
ONE = (1,)
FP32 = ("fp32",)
BF16 = ("bf16",)


def then_train(t: Any, change: Callable[[Any], Any]) -> None:
    t.start()
    t.train(1)
    change(t.model)
    t.train(2, start=1)


# ---- freezing


@rows("`requires_grad_(False)` and back")
def freeze(t: Any) -> None:
    t.start()
    for step in range(4):
        t.model.blocks[1].requires_grad_(step not in (1, 2))
        t.engine.backward(t.loss(step))
        t.engine.step(force=True)


@rows("`p.requires_grad = False` for one parameter")
def freeze_one(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks[1].up.bias.requires_grad = False

    then_train(t, change)


@rows("frozen between forward and backward", sharded=either(), accumulate=ONE)
def freeze_late(t: Any) -> None:
    t.start()
    for step in range(3):
        loss = t.loss(step)
        t.model.leave.requires_grad_(step != 1)
        t.engine.backward(loss)
        t.engine.step()


@rows("frozen between backward and step", either(), accumulate=ONE)
def freeze_before_step(t: Any) -> None:
    t.start()
    for step in range(3):
        t.model.leave.requires_grad_(True)
        t.engine.backward(t.loss(step))
        t.model.leave.requires_grad_(step != 1)
        t.engine.step()


@rows("everything but the head frozen after `initialize`")
def linear_probe(t: Any) -> None:
    def change(model: Any) -> None:
        model.requires_grad_(False)
        model.leave.requires_grad_(True)

    then_train(t, change)


@rows("frozen before `initialize`, and for good")
def frozen_first(t: Any) -> None:
    model = nets.build()
    model.enter.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    t.start(model)
    t.train(3)


@rows("frozen at `initialize` and unfrozen later", refused("blocks.1", "frozen at initialize"))
def unfrozen(t: Any) -> None:
    model = nets.build()
    model.blocks[1].requires_grad_(False)
    t.start(model, adamw(model.parameters()))
    t.train(1)
    model.blocks[1].requires_grad_(True)
    t.train(2, start=1)


@rows("gradual unfreezing from the top")
def gradual(t: Any) -> None:
    t.start()
    for step in range(4):
        for index, block in enumerate(t.model.blocks):
            block.requires_grad_(step >= 3 - index)
        t.engine.backward(t.loss(step))
        t.engine.step(force=True)


@rows("two parts of the model, frozen and trained in turns", accumulate=ONE)
def in_turns(t: Any) -> None:
    t.start()
    for step in range(4):
        t.model.blocks.requires_grad_(step % 2 == 0)
        t.model.leave.requires_grad_(step % 2 == 1)
        t.engine.backward(t.loss(step))
        t.engine.step()


# ---- moving and casting


@rows("`model.half()`", refused("dtype"), sharded=refused(), alone=refused())
def half(t: Any) -> None:
    t.start()
    t.model.half()
    t.train(2)


@rows("`model.double()`", refused("dtype"), sharded=refused(), alone=refused())
def double(t: Any) -> None:
    t.start()
    t.model.double()
    t.train(2)


@rows(
    "`model.bfloat16()` of an engine in fp32",
    refused("dtype"),
    sharded=refused(),
    alone=refused(),
    precision=FP32,
)
def to_bf16(t: Any) -> None:
    t.start()
    t.model.to(torch.bfloat16)
    t.train(2)


@rows(
    "`model.float()` of an engine in bf16",
    refused("dtype"),
    sharded=refused(),
    alone=refused(),
    precision=BF16,
)
def to_fp32(t: Any) -> None:
    then_train(t, lambda model: model.float())


@rows("`model.float()` of an engine in fp32")
def float_again(t: Any) -> None:
    if t.cell.precision == "fp32":
        then_train(t, lambda model: model.float())
    else:
        then_train(t, lambda model: model.bfloat16())


@rows('`model.cpu()` and `model.to("cpu")`')
def to_cpu(t: Any) -> None:
    then_train(t, lambda model: model.cpu().to("cpu"))


@rows("one layer in another dtype: `layer.to(dtype)`", raises())
def layer_dtype(t: Any) -> None:
    then_train(t, lambda model: model.leave.to(torch.float64))


@rows("`model.share_memory()`", refused("share"), sharded=refused(), alone=refused())
def share_memory(t: Any) -> None:
    then_train(t, lambda model: model.share_memory())


@rows('`model.to("meta")`', refused("meta"), sharded=refused(), alone=refused())
def to_meta(t: Any) -> None:
    t.start()
    t.train(1)
    t.model.to("meta")
    if not t.plain:
        t.train(1, start=1)


@rows("`model.to_empty(...)`, then values written")
def to_empty(t: Any) -> None:
    def change(model: Any) -> None:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(nets.ramp(p))

    then_train(t, change)


# ---- replacing


@rows("`torch.utils.swap_tensors(p, q)`", refused("use_count"))
def swap_tensors(t: Any) -> None:
    then_train(
        t,
        lambda model: torch.utils.swap_tensors(
            model.leave.weight, nn.Parameter(torch.ones(1, 8, dtype=model.leave.weight.dtype))
        ),
    )


@rows("`load_state_dict(assign=True)`", refused("enter.weight"))
def load_assign(t: Any) -> None:
    def change(model: Any) -> None:
        state = nets.models.fill(nets.Net(), seed=8).state_dict()
        dtype = model.leave.weight.dtype
        model.load_state_dict({n: v.to(dtype) for n, v in state.items()}, assign=True)

    then_train(t, change)


def like(model: Any) -> nn.Parameter:
    return nn.Parameter(torch.full((1, 8), 0.25, dtype=model.leave.weight.dtype))


@rows("`layer.weight = nn.Parameter(...)`", refused("leave.weight"))
def new_parameter(t: Any) -> None:
    def change(model: Any) -> None:
        model.leave.weight = like(model)

    then_train(t, change)


@rows("`model.head = nn.Linear(...)`", refused("leave.weight"))
def new_head(t: Any) -> None:
    def change(model: Any) -> None:
        torch.manual_seed(1)
        model.leave = nn.Linear(8, 1).to(model.leave.weight.dtype)

    then_train(t, change)


@rows("`register_parameter` of a new one, used from then on", refused("extra"))
def register(t: Any) -> None:
    def change(model: Any) -> None:
        model.leave.register_parameter("extra", like(model))
        model.leave.register_forward_hook(lambda m, _i, output: output + m.extra.sum())

    then_train(t, change)


@rows("a module with parameters added: an adapter", refused("adapter"))
def add_adapter(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks[1].adapter = nn.Linear(8, 8).to(model.leave.weight.dtype)
        model.blocks[1].register_forward_hook(lambda m, _i, output: output + m.adapter(output))

    then_train(t, change)


@rows("a module without parameters added")
def add_activation(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks.append(nn.Tanh())

    then_train(t, change)


@rows("a buffer added")
def add_buffer(t: Any) -> None:
    def change(model: Any) -> None:
        model.register_buffer("gain", torch.tensor(0.5))
        model.register_forward_hook(lambda m, _i, output: output * m.gain)

    then_train(t, change)


@rows("the last block removed: `del model.blocks[2]`")
def remove_block(t: Any) -> None:
    def change(model: Any) -> None:
        del model.blocks[2]

    then_train(t, change)


@rows("a block replaced by `nn.Identity()`")
def replace_block(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks[1] = nn.Identity()

    then_train(t, change)


@rows("`layer.bias = None`")
def remove_bias(t: Any) -> None:
    def change(model: Any) -> None:
        model.leave.bias = None

    then_train(t, change)


@rows("`del layer.bias` and `register_parameter(..., None)`")
def unregister_bias(t: Any) -> None:
    def change(model: Any) -> None:
        del model.blocks[1].up.bias
        model.blocks[1].up.register_parameter("bias", None)

    then_train(t, change)


@rows("blocks in another order", sharded=either())
def reorder(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks = nn.Sequential(*reversed(list(model.blocks)))

    then_train(t, change)


@rows("a block taken out and put back")
def put_back(t: Any) -> None:
    t.start()
    t.train(1)
    block = t.model.blocks[1]
    t.model.blocks[1] = nn.Identity()
    t.train(1, start=1)
    t.model.blocks[1] = block
    t.train(1, start=2)


@rows("a module wrapped in place: `model.head = nn.Sequential(model.head, ...)`")
def wrap_head(t: Any) -> None:
    def change(model: Any) -> None:
        model.leave = nn.Sequential(model.leave, nn.Tanh())

    then_train(t, change)


# ---- tying


class Tied(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = self.blocks[1].norm


@rows("weights and modules tied before `initialize`")
def tied(t: Any) -> None:
    t.start(nets.build(Tied))
    t.train(3)


@rows("weights tied after `initialize`", either())
def tie_later(t: Any) -> None:
    def change(model: Any) -> None:
        model.blocks[2].up.weight = model.blocks[0].up.weight

    then_train(t, change)


@rows("tied weights untied later, with a new `Parameter`", refused("blocks.2.up.weight"))
def untie(t: Any) -> None:
    t.start(nets.build(Tied))
    t.train(1)
    weight = t.model.leave.weight
    t.model.blocks[2].up.weight = nn.Parameter(torch.ones(16, 8, dtype=weight.dtype))
    t.train(1, start=1)


@rows("two `Parameter`s over one storage", refused("storage"))
def one_storage(t: Any) -> None:
    model = nets.build()
    model.blocks[2].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    t.start(model)
    t.train(2)


@rows("parameters that are slices of one tensor", either(), precision=FP32)
def slices(t: Any) -> None:
    model = nets.build()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = 0
    for p in model.parameters():
        p.data = flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    t.start(model)
    t.train(3)


# ---- kinds


class Kinds(nets.Net):
    """A `ParameterList`, a `ParameterDict`, an empty, a 0-dimensional and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(3)])
        self.shifts = nn.ParameterDict({"first": torch.zeros(8), "last": torch.zeros(())})
        self.nothing = nn.Parameter(torch.zeros(0))
        self.turned = nn.Parameter(torch.randn(5, 8).t())

    def trunk(self, features: torch.Tensor) -> torch.Tensor:
        x = self.enter(features.to(self.enter.weight.dtype)) + self.shifts["first"]
        for gain, block in zip(self.gains, self.blocks, strict=True):
            x = block(x) * gain
        return x @ self.turned @ self.turned.t() + self.shifts["last"] + self.nothing.sum()


@rows("`ParameterList`, `ParameterDict`, empty, 0-dimensional and transposed parameters")
def all_kinds(t: Any) -> None:
    t.start(nets.build(Kinds))
    t.train(3)


@rows("an integer parameter, which needs no gradient", either())
def integer(t: Any) -> None:
    model = nets.build()
    model.index = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
    model.blocks.register_forward_hook(lambda _m, _i, x: x[:, model.index])
    t.start(model)
    t.train(3)


@rows("a complex parameter", either(), precision=FP32)
def complex_parameter(t: Any) -> None:
    model = nets.build()
    model.turn = nn.Parameter(torch.full((8,), 0.5 + 0.5j))
    model.blocks.register_forward_hook(lambda _m, _i, x: x + (x * model.turn).real)
    t.start(model)
    t.train(2)


@rows("attributes set on a parameter: `p.no_decay = True`")
def attributes(t: Any) -> dict[str, Any]:
    model = nets.build()
    model.leave.bias.no_decay = True
    t.start(model)
    t.train(2)
    return {"kept": [getattr(p, "no_decay", False) for p in t.model.parameters()]}


class Tagged(nn.Parameter):
    """A subclass."""


@rows("a subclass of `nn.Parameter`", either())
def subclass(t: Any) -> dict[str, Any]:
    model = nets.build()
    model.leave.weight = Tagged(model.leave.weight.data)
    t.start(model)
    t.train(2)
    return {"kept": isinstance(t.model.leave.weight, Tagged)}


@rows("the same objects, order, names and shapes as before `initialize`")
def identity(t: Any) -> dict[str, Any]:
    model = nets.build()
    before = {name: (id(p), p.shape, p.stride()) for name, p in model.named_parameters()}
    t.start(model)
    t.train(1)
    after = {name: (id(p), p.shape, p.stride()) for name, p in model.named_parameters()}
    same = before == after and list(before) == list(after)
    return {"same": same, "leaves": [p.is_leaf for p in model.parameters()]}


@rows("`sum(p.numel())` and bytes, for a log")
def sizes(t: Any) -> dict[str, Any]:
    t.start()
    t.train(1)
    params = list(t.model.parameters())
    count = sum(p.numel() for p in params if p.requires_grad)
    return {"count": count, "bytes": sum(p.numel() * p.element_size() for p in params)}


@rows("a lazy module that has seen no input", refused("lazy"), precision=FP32)
def lazy(t: Any) -> None:
    model = nets.build()
    model.leave = nn.LazyLinear(1)
    if t.plain:
        model(t.batch(0)[0])
    t.start(model)


@rows("a lazy module that has seen an input before `initialize`")
def lazy_ready(t: Any) -> None:
    model = nets.Net()
    model.leave = nn.LazyLinear(1)
    model(torch.zeros(1, 6))
    t.start(nets.models.fill(model))
    t.train(3)


@rows("a parameter that no forward uses")
def unused(t: Any) -> None:
    model = nets.build()
    model.spare = nn.Parameter(torch.ones(3))
    t.start(model)
    t.train(3)


@rows("a parameter that only the loss reads, every other step", sharded=either())
def now_and_then(t: Any) -> None:
    model = nets.build()
    model.gain = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float32))
    t.start(model)
    for step in range(4):
        loss = t.loss(step)
        if step % 2:
            loss = loss + t.model.gain.float().pow(2).sum()
        t.engine.backward(loss)
        t.engine.step(force=True)


def penalised(t: Any, inside: bool) -> None:
    """The square keeps the weights for its backward."""
    t.start()
    for step in t.steps(2):
        with t.engine.gathered():
            penalty = sum(one.up.weight.square().mean() for one in t.model.blocks)
            loss = t.loss(step) + 0.01 * penalty
            if inside:
                t.engine.backward(loss)
        if not inside:
            t.engine.backward(loss)
        t.engine.step()


@rows("a penalty on the weights of blocks, with its backward inside `gathered()`")
def penalty_inside(t: Any) -> None:
    penalised(t, True)


@rows(
    "a penalty on the weights of blocks, with its backward after `gathered()`",
    sharded=either("call backward there, too"),
)
def penalty_outside(t: Any) -> None:
    penalised(t, False)
