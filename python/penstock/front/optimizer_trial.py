"""Copies of an optimizer on a small parameter, which show what its methods do.

An optimizer that computes in Python works on slices of parameters, so each of its updates must give
a slice the values that it gives the whole parameter. A trial runs the same method on a small
parameter and on the parameter's slices, each with an optimizer of its own, and compares all values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
import traceback
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._native import ConfigError

CUT = 11  # first element of the second half; a trial has 24 elements
SHAPES = (torch.Size([4, 6]), torch.Size([2, 3, 2, 2]))
# The size of each step's gradient; 0: nearly orthogonal to the parameter. Some optimizers clip a
# gradient, or project it if it is orthogonal.
_GRADIENTS = (1.0, 1.0, 0.0, 1.0, 1e-3, 1.0, 1.0, 0.0, 1.0, 1e3, 1.0, 1.0)
STEPS = len(_GRADIENTS)
_SCALES = (1.0, 1e-3)  # of the parameter: small values show small updates
_LEAST_LR = 1e-3
_TRIED_NUMEL = 1 << 22  # elements of the largest parameter that is tried

Optimizer = torch.optim.Optimizer
Of = Callable[[torch.Tensor], torch.Tensor]


class CannotTry(Exception):
    """A method does something that a trial on one rank cannot show."""


def told(error: BaseException) -> str:
    """Returns the error's class and text, or for an assertion its place in the code."""
    if str(error) and not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(at.filename)}:{at.lineno}: {at.line}"
    return f"{type(error).__name__} in {at.name}(), {place}"


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in `seen` whether an operation uses the parameter. Refuses collectives."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._memory = param.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise CannotTry("exchanges values with other ranks, which hold other shards")
        for one in leaves([list(args), kwargs or {}]):
            if isinstance(one, torch.Tensor):
                self.seen |= one.untyped_storage()._cdata == self._memory
        return func(*args, **(kwargs or {}))


def _copied(value: Any, of: Of, seen: dict[int, Any]) -> Any:
    """Returns a copy in which `of` replaces each tensor. `seen` maps ids to finished copies."""
    if id(value) in seen:
        return seen[id(value)]
    made: Any
    if isinstance(value, torch.Tensor):
        made = of(value)
    elif isinstance(value, dict):
        made = seen[id(value)] = copy.copy(value)
        made.clear()
        made.update({_copied(k, of, seen): _copied(v, of, seen) for k, v in value.items()})
    elif isinstance(value, list):
        made = seen[id(value)] = []
        made.extend(_copied(one, of, seen) for one in value)
    elif type(value) in (tuple, set):
        made = type(value)(_copied(one, of, seen) for one in value)
    elif isinstance(value, Optimizer):
        made = seen[id(value)] = object.__new__(type(value))
        for name, one in vars(value).items():
            made.__dict__[name] = _copied(one, of, seen)
    elif isinstance(value, types.MethodType) and id(value.__self__) in seen:
        made = types.MethodType(value.__func__, seen[id(value.__self__)])
    elif isinstance(value, torch.nn.Module) or callable(value):
        made = value
    else:
        made = copy.deepcopy(value)
    seen[id(value)] = made
    return made


def _clone(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(value.detach().clone(), value.requires_grad)
        vars(made).update(vars(value))
        return made
    return value.detach().clone()


def same_as(optimizer: Optimizer) -> Optimizer:
    """Returns a copy of a trial's optimizer, with copies of its parameter, state and attributes."""
    made: Optimizer = _copied(optimizer, _clone, {})
    return made


def halves(optimizer: Optimizer) -> list[Optimizer]:
    """Returns two copies of a trial's optimizer, each with one slice of its parameter and state."""
    numel = param_of(optimizer).numel()

    def part(of_slice: slice) -> Of:
        def cut(value: torch.Tensor) -> torch.Tensor:
            if value.numel() != numel:
                return _clone(value)
            one = value.detach().flatten()[of_slice].clone()
            if not isinstance(value, torch.nn.Parameter):
                return one
            made = torch.nn.Parameter(one, value.requires_grad)
            vars(made).update(vars(value))
            return made

        return cut

    return [_copied(optimizer, part(s), {}) for s in (slice(None, CUT), slice(CUT, None))]


def param_of(optimizer: Optimizer) -> torch.Tensor:
    """Returns the parameter of a trial's optimizer."""
    param: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return param


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of a group's options. A small learning rate is raised, so that steps show."""
    options = {k: _copied(v, _clone, {}) for k, v in group.items() if k != "params"}
    lr = options.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() == 1:
        options["lr"] = lr.clamp(min=_LEAST_LR)
    elif isinstance(lr, (int, float)):
        options["lr"] = max(lr, _LEAST_LR)
    return options


def fresh_state(optimizer: Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """Returns the state that some optimizers (Adagrad) make in the constructor, for `param`.

    Raises ConfigError if a state has more than one value, so that it cannot be expanded.
    """
    made: dict[str, Any] = {}
    for owner, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == owner.shape and value.numel() > 1:
                if not torch.equal(value, value.flatten()[0].expand_as(value)):
                    raise ConfigError(
                        f"[front::initialize] the optimizer's state {key!r} changed since it was "
                        f"built. Pass a new optimizer"
                    )
                made[key] = value.flatten()[0].expand_as(param).clone()
            else:
                made[key] = copy.deepcopy(value)
        if made:
            break
    return made


def _attributes(optimizer: Optimizer, kept: dict[int, Any]) -> dict[str, Any]:
    """Returns copies of the optimizer's attributes. `kept` maps the ids of its groups and state.

    Raises CannotTry if an attribute holds parameters beside those of the groups, because the engine
    replaces only the latter by shards.
    """
    real = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = ""

    def clone(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in real:
            return _clone(value)
        raise CannotTry(
            f'keeps parameters in its attribute "{name}", but the engine gives shards only to '
            f"param_groups: read them there"
        )

    made: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):  # hooks run once per step of the engine
            made[name] = OrderedDict()
        elif name not in ("param_groups", "state", "step"):
            made[name] = _copied(value, clone, kept)
    return made


def on(optimizer: Optimizer, params: Sequence[torch.nn.Parameter]) -> Optimizer:
    """Returns an optimizer of the same class, settings and attributes for other parameters."""
    first = optimizer.param_groups[0]
    group = {**options_of(first), "params": list(params)}
    state: Any = defaultdict(dict)
    kept: dict[int, Any] = {id(optimizer.param_groups): [group], id(optimizer.state): state}
    kept |= {id(one): group for one in optimizer.param_groups}
    probe: Optimizer = object.__new__(type(optimizer))
    kept[id(optimizer)] = probe
    probe.__dict__ = _attributes(optimizer, kept)
    probe.param_groups, probe.state = [group], state
    owner = next(iter(first["params"]), None)
    for param in params:
        vars(param).update(vars(owner) if owner is not None else {})
        made = fresh_state(optimizer, param)
        if made:
            state[param] = made
    train = getattr(probe, "train", None)
    if callable(train):  # schedule-free optimizers step in train mode only
        with contextlib.suppress(TypeError):
            inspect.signature(train).bind()
            train()
    return probe


def step(probe: Optimizer, gradients: Sequence[torch.Tensor]) -> None:
    """Takes a step with these gradients of the probe's parameters."""
    for param, gradient in zip(probe.param_groups[0]["params"], gradients, strict=True):
        param.grad = gradient.clone()
    probe.step()
    for param in probe.param_groups[0]["params"]:
        param.grad = None


def _cut(values: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = values.flatten()
    return flat[:at].clone(), flat[at:].clone()


def _close(one: torch.Tensor, other: torch.Tensor, moved: float) -> bool:
    return torch.allclose(one.flatten(), other.flatten(), rtol=1e-6, atol=1e-5 * moved)


def _gradient(kind: float, param: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a random gradient of this size; 0: nearly orthogonal to each row of the parameter."""
    drawn = torch.randn(param.shape, generator=generator)
    if kind:
        return kind * drawn
    rows, values = param.detach().reshape(len(param), -1), drawn.reshape(len(param), -1)
    along = (rows * values).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    near = 0.01 * values.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True)
    made: torch.Tensor = values + (near - along) * rows
    return made.reshape(param.shape)


def in_slices(optimizer: Optimizer, start: torch.Tensor, at: int, steps: int) -> str:
    """Takes steps on a parameter, on its two slices, and on each slice alone.

    Returns "", or how their values differ.
    """
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter
    whole, parts = param(start.clone()), [param(one) for one in _cut(start, at)]
    alone = [param(one) for one in _cut(start, at)]
    probes = [on(optimizer, chosen) for chosen in ([whole], parts, alone[:1], alone[1:])]
    window = whole.untyped_storage()._cdata
    for kind in _GRADIENTS[:steps]:
        before = whole.detach().clone()
        gradient = _gradient(kind, whole, generator)
        first, second = _cut(gradient, at)
        given = ([gradient], [first, second], [first], [second])
        with Watch(whole):
            for probe, chosen in zip(probes, given, strict=True):
                step(probe, chosen)
        if whole.untyped_storage()._cdata != window:
            return "it gives a parameter other memory (p.data = x); use p.data.copy_(x)"
        moved = float((whole.detach() - before).abs().max())
        if not _close(whole, torch.cat([*parts]), moved):
            return "it updates a parameter and its slices differently"
        if not _close(whole, torch.cat([*alone]), moved):
            return "its step on one parameter depends on the others"
    if torch.equal(whole, start) and steps == STEPS:
        return "in a trial it changed no parameter of param_groups"
    if start.numel() == 1:  # a count of steps looks like a value per element
        return ""
    return _state_of_slices(probes[0], probes[2:])


def _state_of_slices(whole: Optimizer, slices: list[Optimizer]) -> str:
    """Returns why the state and options of the slices are not those of the whole, or ""."""
    states = [probe.state.get(param_of(probe), {}) for probe in (whole, *slices)]
    for value in states[0].values():
        if not is_plain(value):
            return f"its state has a {type(value).__name__}, which cannot be cut"
    first, *others = [[*leaves(state)] for state in states]
    if not same(joined(others, first, param_of(whole).numel()), first):
        return "its state depends on the whole parameter"
    for probe in slices:
        here, there = ({**one.param_groups[0], "params": None} for one in (probe, whole))
        if not same([*leaves(here)], [*leaves(there)]):
            return "the options that it sets depend on all elements"
    return ""


def check_elementwise(optimizer: Optimizer, others: str) -> None:
    """Raises ConfigError unless the optimizer updates slices of a parameter like the whole.

    Steps on small parameters and on their flat slices must give the same values, within rtol 1e-6
    and 1e-5 of the largest change. `others` names the optimizers to use instead.
    """
    problem = ""
    with torch.random.fork_rng(devices=[]):
        for shape, scale in itertools.product(SHAPES, _SCALES):
            start = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
            try:
                _check_inner(optimizer)
                problem = problem or in_slices(optimizer, start, CUT, STEPS)
            except ConfigError:
                raise
            except CannotTry as error:
                problem = f"it {error}"
            except Exception as error:  # noqa: BLE001 - this class cannot step on slices
                problem = f"on slices of a parameter it raised {told(error)}"
    if problem:
        raise ConfigError(
            f"[front::initialize] {type(optimizer).__name__} is not elementwise ({problem}), so it "
            f"cannot run on shards. Use {others} or another elementwise optimizer"
        )


def _check_inner(optimizer: Optimizer) -> None:
    groups = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        inner = value if isinstance(value, (list, tuple)) else [value]
        for one in inner:
            if isinstance(one, Optimizer) and any(id(g) not in groups for g in one.param_groups):
                raise CannotTry(
                    f'keeps another optimizer in its attribute "{name}", with parameter groups of '
                    f"its own: build that one from self.param_groups"
                )


def check_sizes(optimizer: Optimizer, sizes: set[int], world: int, others: str) -> None:
    """Raises ConfigError if the optimizer's rule depends on the size of a parameter.

    Compares a parameter of each size in `sizes` with its shard, which is `world` times smaller.
    """
    tried = sorted({min(size, _TRIED_NUMEL) for size in sizes})
    with torch.random.fork_rng(devices=[]):
        for numel in {*tried[:: max(1, len(tried) // 8)], *tried[-1:]}:
            start = torch.randn(numel, generator=torch.Generator().manual_seed(0))
            problem = in_slices(optimizer, start, max(1, numel // world), steps=2)
            if problem:
                raise ConfigError(
                    f"[front::initialize] {type(optimizer).__name__} is not elementwise (with "
                    f"{numel} elements {problem}), so it cannot run on shards. Use {others} or "
                    f"another elementwise optimizer"
                )


def leaves(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields the tensors and numbers in a value, an optimizer's attributes included."""
    seen = set() if seen is None else seen
    if isinstance(value, Optimizer):
        value = {k: v for k, v in vars(value).items() if not k.endswith("_hooks")}
    if isinstance(value, (dict, list, tuple)):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(key, torch.Tensor):
                yield key
            yield from leaves(one, seen)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one, seen)
    elif isinstance(value, (torch.Tensor, bool, int, float)):
        yield value


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        one, other = ours.detach().double().flatten(), theirs.detach().double().flatten()
        near = functools.partial(torch.allclose, rtol=1e-6, atol=1e-7, equal_nan=True)
        return one.numel() == other.numel() and bool(near(one, other))
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return False
    return bool(ours == theirs or abs(ours - theirs) <= 1e-6 * abs(ours) or ours != ours)


def same(ours: list[Any] | None, theirs: list[Any]) -> bool:
    """Whether two lists of tensors and numbers have the same values, within rtol 1e-6."""
    if ours is None or len(ours) != len(theirs):
        return False
    return all(map(_equal, ours, theirs))


def joined(parts: list[list[Any]], whole: list[Any], numel: int) -> list[Any] | None:
    """Returns the slices' values, joined where the whole has one value per element."""
    if any(len(part) != len(whole) for part in parts):
        return None
    made: list[Any] = []
    for one, first, second in zip(whole, *parts, strict=True):
        if isinstance(one, torch.Tensor) and one.numel() == numel:
            if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
                return None
            made.append(torch.cat([first.detach().flatten(), second.detach().flatten()]))
        elif not same([first], [second]):
            return None
        else:
            made.append(first)
    return made


def is_plain(value: Any) -> bool:
    """Whether the value consists of numbers, texts, tensors and containers."""
    if isinstance(value, dict):
        return all(is_plain(one) for both in value.items() for one in both)
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(
        value, (bool, int, float, str, torch.Tensor, torch.dtype, torch.device)
    )
