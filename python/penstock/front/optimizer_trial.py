"""Copies of an optimizer on a small parameter, which show what its methods do.

An optimizer that computes in Python works on slices of parameters. So an update of a slice must
give the values that an update of the whole parameter gives there. A trial runs the same method on
small parameters and on their slices, with a separate optimizer for each, and compares all values.
An optimizer may treat parameters differently by group, number of dims or kind of attributes, so a
trial has a small parameter for each of these that occurs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import traceback
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._native import ConfigError

NUMEL = 24  # elements of a trial's parameter, if it has dims
CUT = 11  # first element of the second half
# Numbers of dims; with these, most optimizers are refused for all models or for none.
_ALWAYS_TRIED = (2, 4)
_FEW_GROUPS = 8  # up to this number, all groups are tried; above it, one of each kind
_MANY_KINDS = 32
# The size of each step's gradient; 0: nearly orthogonal to the parameter. Some optimizers clip a
# gradient, and some project an orthogonal one.
GRADIENTS = (1.0, 1.0, 0.0, 1.0, 1e-3, 1.0, 1.0, 0.0, 1.0, 1e3, 1.0, 1.0)
STEPS = len(GRADIENTS)
SCALES = (1.0, 1e-3)  # of the parameter: small values show small updates
_LEAST_LR = 1e-3

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


@dataclass(frozen=True)
class Sample:
    """A small parameter of a trial: its shape, and a parameter of the model that it stands for."""

    group: int  # index of the parameter's group, or of the first group of that kind
    owner: torch.Tensor
    shape: torch.Size


def _kind(value: Any, texts: bool) -> Hashable:
    """Returns a key that is equal for values of one kind: for a number, only the sign counts."""
    if isinstance(value, dict):
        return tuple(sorted((str(key), repr(_kind(one, texts))) for key, one in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_kind(one, texts) for one in value)
    if isinstance(value, (int, float)):
        return (value > 0) - (value < 0)
    return value if value is None or (texts and isinstance(value, str)) else type(value).__name__


def _kinds(values: list[dict[str, Any]]) -> list[Hashable]:
    keys: list[Hashable] = []
    for texts in (True, False):  # texts may be names, which all differ
        keys = [_kind(one, texts) for one in values]
        if len(set(keys)) <= _MANY_KINDS:
            break
    return keys


def first_groups(optimizer: Optimizer) -> list[int]:
    """Returns for each group the group that a trial has in its place."""
    groups = optimizer.param_groups
    if len(groups) <= _FEW_GROUPS:
        return list(range(len(groups)))
    keys = _kinds([{k: v for k, v in group.items() if k != "params"} for group in groups])
    return [keys.index(key) for key in keys]


def sorted_params(optimizer: Optimizer) -> Iterator[tuple[int, Hashable, torch.Tensor]]:
    """Yields the group that a trial has, the kind of attributes, and the parameter."""
    groups = zip(first_groups(optimizer), optimizer.param_groups, strict=True)
    params = [(index, p) for index, group in groups for p in group["params"]]
    kinds = _kinds([vars(p) for _, p in params])
    for (index, p), kind in zip(params, kinds, strict=True):
        yield index, kind, p


def _small(ndim: int) -> torch.Size:
    shapes = ((), (NUMEL,), (4, 6), (2, 3, 4))
    return torch.Size(shapes[ndim] if ndim < len(shapes) else (2, 3, 2, 2) + (1,) * (ndim - 4))


def samples(optimizer: Optimizer) -> list[Sample]:
    """Returns a sample of each kind of parameter that the optimizer may treat differently."""
    found: dict[Hashable, Sample] = {}
    for index, kind, p in sorted_params(optimizer):
        for ndim in (p.ndim, *_ALWAYS_TRIED):
            found.setdefault((index, kind, ndim), Sample(index, p, _small(ndim)))
    return list(found.values())


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in `seen` whether an operation uses one of the parameters. Refuses collectives."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._memory = windows(params)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise CannotTry("exchanges values with other ranks, which hold other shards")
        for one in leaves([list(args), kwargs or {}]):
            if isinstance(one, torch.Tensor):
                self.seen |= one.untyped_storage()._cdata in self._memory
        return func(*args, **(kwargs or {}))


def windows(params: Iterable[torch.Tensor]) -> list[int]:
    """Returns numbers that are equal as long as the parameters keep their memory."""
    return [p.untyped_storage()._cdata for p in params]


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
    elif isinstance(value, (torch.nn.Module, int, float, str)) or callable(value):
        made = value
    else:
        made = copy.deepcopy(value)
    seen[id(value)] = made
    return made


def _made(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copies the values to host memory, where trials run; into a parameter if `like` is one."""
    copied = values.detach().cpu().clone()
    if not isinstance(like, torch.nn.Parameter):
        return copied
    made = torch.nn.Parameter(copied, like.requires_grad)
    vars(made).update(vars(like))
    return made


def _clone(value: torch.Tensor) -> torch.Tensor:
    return _made(value, value)


def same_as(optimizer: Optimizer) -> Optimizer:
    """Returns a copy of a trial's optimizer, including its parameters, state and attributes."""
    made: Optimizer = _copied(optimizer, _clone, {})
    return made


def halves(optimizer: Optimizer) -> list[Optimizer]:
    """Returns two copies of a trial's optimizer, each with a slice of the parameters and state."""

    def part(of_slice: slice) -> Of:
        def cut(value: torch.Tensor) -> torch.Tensor:
            if value.numel() == NUMEL:
                return _made(value.flatten()[of_slice], value)
            flat = isinstance(value, torch.nn.Parameter)  # a shard of one element has a dim
            return _made(value.flatten() if flat else value, value)

        return cut

    return [_copied(optimizer, part(s), {}) for s in (slice(None, CUT), slice(CUT, None))]


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of a trial's optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of a group's options, with a learning rate that makes steps visible."""
    options = {k: _copied(v, _clone, {}) for k, v in group.items() if k != "params"}
    lr = options.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() == 1:
        options["lr"] = lr.clamp(min=_LEAST_LR)
    elif isinstance(lr, (int, float)):
        options["lr"] = max(lr, _LEAST_LR)
    return options


def fresh_state(optimizer: Optimizer, param: torch.Tensor, owner: torch.Tensor) -> dict[str, Any]:
    """Returns the state that constructors such as Adagrad's make, for `param`. `param` takes the
    place of the model's parameter `owner` and may be on a different device."""
    made: dict[str, Any] = {}
    for key, value in optimizer.state.get(owner, {}).items():
        if _per_element(optimizer, key, owner):
            values = value.flatten()[:1].to(param.device)
            made[key] = values.expand(param.numel()).clone().reshape(param.shape)
        else:
            made[key] = copy.deepcopy(value)
    return made


def _per_element(optimizer: Optimizer, key: Any, owner: torch.Tensor) -> bool:
    """Whether a state has a value per element, judged by a parameter with dims if there is one."""
    like = owner
    if owner.ndim == 0:
        params = (one for one in optimizer.state if isinstance(one, torch.Tensor) and one.ndim > 0)
        like = next((one for one in params if key in optimizer.state[one]), owner)
    value = optimizer.state[like][key]
    return isinstance(value, torch.Tensor) and value.shape == like.shape and value.ndim > 0


def check_state(optimizer: Optimizer) -> None:
    """Raises ConfigError if a state that the constructor made has more than one value."""
    for owner, state in optimizer.state.items():
        for key, value in state.items() if isinstance(owner, torch.Tensor) else ():
            if not _per_element(optimizer, key, owner) or value.numel() == 0:
                continue
            if not torch.equal(value, value.flatten()[0].expand_as(value)):
                raise ConfigError(
                    f"[front::initialize] the state {key!r} of {type(optimizer).__name__} has "
                    f"different values for different elements before the first step, so the engine "
                    f"cannot shard it. Create it in step(), or pass a new optimizer"
                )


def own_entries(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of the optimizer's state that belong to no parameter."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _attributes(optimizer: Optimizer, kept: dict[int, Any]) -> dict[str, Any]:
    """Returns copies of the optimizer's attributes. `kept` maps the ids of its groups and state.

    Raises CannotTry if an attribute holds parameters besides those of the groups, because the
    engine replaces only those by shards.
    """
    real = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = ""

    def clone(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in real:
            return _clone(value)
        raise CannotTry(
            f'keeps parameters in its attribute "{name}", but the engine puts shards only into '
            f"param_groups: read them from there"
        )

    made: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):  # hooks run once per step of the engine
            made[name] = OrderedDict()
        elif name not in ("param_groups", "state", "step"):
            made[name] = _copied(value, clone, kept)
    return made


def on(
    optimizer: Optimizer, chosen: Sequence[tuple[Sample, Sequence[torch.nn.Parameter]]]
) -> Optimizer:
    """Returns an optimizer of the same class, settings and attributes, with these parameters in
    place of each sample."""
    firsts, groups = first_groups(optimizer), optimizer.param_groups
    made = {i: {**options_of(groups[i]), "params": []} for i in sorted({*firsts})}
    for sample, params in chosen:
        made[sample.group]["params"] += params
    probe: Optimizer = object.__new__(type(optimizer))
    state: Any = defaultdict(dict)
    kept: dict[int, Any] = {id(groups): [*made.values()], id(optimizer.state): state}
    kept |= {id(group): made[first] for group, first in zip(groups, firsts, strict=True)}
    kept[id(optimizer)] = probe
    probe.__dict__ = _attributes(optimizer, kept)
    probe.param_groups, probe.state = kept[id(groups)], state
    state.update(_copied(own_entries(optimizer), _clone, kept))
    for sample, params in chosen:
        for param in params:
            vars(param).update(vars(sample.owner))
            fresh = fresh_state(optimizer, param, sample.owner)
            if fresh:
                state[param] = fresh
    train = getattr(probe, "train", None)
    if callable(train):  # schedule-free optimizers step in train mode only
        with contextlib.suppress(TypeError):
            inspect.signature(train).bind()
            train()
    return probe


def step(probe: Optimizer, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Takes a step with these gradients of the probe's parameters."""
    for param, gradient in gradients:
        param.grad = gradient.clone().reshape(param.shape)
    probe.step()
    for param in params_of(probe):
        param.grad = None


def cut(values: torch.Tensor, at: int) -> list[torch.Tensor]:
    """Returns flat copies of both slices, or of the whole if it has no element `at`."""
    flat = values.detach().flatten()
    return [flat[:at].clone(), flat[at:].clone()] if at < flat.numel() else [flat.clone()]


def _close(one: torch.Tensor, other: torch.Tensor, moved: float) -> bool:
    return torch.allclose(one.flatten(), other.flatten(), rtol=1e-6, atol=1e-5 * moved)


def gradient(kind: float, param: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a random gradient of this size; 0: nearly orthogonal to each row of the parameter."""
    drawn = torch.randn(param.shape, generator=generator)
    if kind:
        return kind * drawn
    num_rows = len(param) if param.ndim > 1 else 1
    rows, values = param.detach().reshape(num_rows, -1), drawn.reshape(num_rows, -1)
    along = (rows * values).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    near = 0.01 * values.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True)
    made: torch.Tensor = values + (near - along) * rows
    return made.reshape(param.shape)


@dataclass
class _Tried:
    """A trial of several samples: whole parameters, both slices, and each slice alone."""

    whole: list[torch.nn.Parameter]
    both: list[list[torch.nn.Parameter]]
    first: list[list[torch.nn.Parameter]]
    second: list[list[torch.nn.Parameter]]  # the first one again if there is only one slice

    def layouts(self) -> list[list[list[torch.nn.Parameter]]]:
        return [[[p] for p in self.whole], self.both, self.first, self.second]

    def step(self, probes: list[Optimizer], gradients: list[torch.Tensor], at: int) -> None:
        given = [cut(one, at) for one in gradients]
        layouts = [[[g] for g in gradients], given, [g[:1] for g in given], [g[-1:] for g in given]]
        for probe, params, pieces in zip(probes, self.layouts(), layouts, strict=True):
            pairs = zip(params, pieces, strict=True)
            step(probe, [one for both in pairs for one in zip(*both, strict=True)])

    def problem(self, index: int, moved: float) -> str:
        whole, both = self.whole[index], self.both[index]
        if not _close(whole, torch.cat([one.detach() for one in both]), moved):
            return "it updates a parameter and its slices differently"
        alone = [self.first[index][0].detach(), self.second[index][0].detach()]
        values = [torch.cat(alone)] if len(both) > 1 else alone
        if not all(_close(whole, one, moved) for one in values):
            return "its step on one parameter depends on the others"
        return ""


def in_slices(
    optimizer: Optimizer, chosen: Sequence[Sample], scale: float, at: int, steps: int
) -> str:
    """Takes steps on parameters, on their two slices, and on each slice alone.

    Returns "", or how their values differ.
    """
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter
    starts = [scale * torch.randn(one.shape, generator=generator) for one in chosen]
    slices = [cut(one, at) for one in starts]
    tried = _Tried(
        [param(one.clone()) for one in starts],
        [[param(one.clone()) for one in both] for both in slices],
        [[param(both[0].clone())] for both in slices],
        [[param(both[-1].clone())] for both in slices],
    )
    layouts = tried.layouts()
    probes = [on(optimizer, [*zip(chosen, layout, strict=True)]) for layout in layouts]
    before_all = windows(tried.whole)
    for kind in GRADIENTS[:steps]:
        before = [one.detach().clone() for one in tried.whole]
        gradients = [gradient(kind, one, generator) for one in tried.whole]
        with Watch(tried.whole):
            tried.step(probes, gradients, at)
        if windows(tried.whole) != before_all:
            return "it gives a parameter new memory (p.data = x); use p.data.copy_(x)"
        for index, (whole, old) in enumerate(zip(tried.whole, before, strict=True)):
            problem = tried.problem(index, float((whole.detach() - old).abs().max()))
            if problem:
                return problem
    if steps == STEPS and all(map(torch.equal, tried.whole, starts)):
        return "in a trial it changed no parameter of param_groups"
    return _state_of_slices(tried, probes)


def _state_of_slices(tried: _Tried, probes: list[Optimizer]) -> str:
    """Returns why state, options and attributes of the slices are not those of the whole, or ""."""
    chosen = [probes[0], *probes[2:]]
    sliced = -1  # elements of a whole parameter that was cut
    for whole, first, second in zip(tried.whole, tried.first, tried.second, strict=True):
        if whole.numel() == 1:  # a count of steps looks like a value per element
            continue
        params = (whole, first[0], second[0])
        states = [probe.state.get(p, {}) for probe, p in zip(chosen, params, strict=True)]
        for value in states[0].values():
            if not is_plain(value):
                return f"its state has a {type(value).__name__}, which cannot be sharded"
        all_of, *others = [[*leaves(state)] for state in states]
        if first[0].numel() < whole.numel():
            sliced = whole.numel()
        if not same(joined(others, all_of, sliced), all_of):
            return "its state depends on the whole parameter"
    for what, of in (("options that it sets depend", options), ("attributes depend", attached)):
        all_of, *others = [[*leaves(of(probe))] for probe in chosen]
        if not same(joined(others, all_of, sliced), all_of):
            return f"the {what} on all elements"
    return ""


def options(probe: Optimizer) -> Any:
    return [{**group, "params": None} for group in probe.param_groups]


def attached(probe: Optimizer) -> Any:
    names = ("param_groups", "state", "defaults")
    return {k: v for k, v in vars(probe).items() if k not in names}


def leaves(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields the tensors and numbers in a value, an optimizer's attributes included."""
    seen = set() if seen is None else seen
    value = vars(value) if isinstance(value, Optimizer) else value
    if isinstance(value, (dict, list, tuple)):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(key, torch.Tensor):
                yield key
            if not (isinstance(key, str) and key.endswith("_hooks")):
                yield from leaves(one, seen)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one, seen)
    elif isinstance(value, (torch.Tensor, bool, int, float)):
        yield value


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.numel() != theirs.numel():
            return False
        one, other = ours.detach().flatten(), theirs.detach().flatten()
        if one.dtype == other.dtype and torch.equal(one, other):
            return True
        one, other = one.double(), other.double()
        # Relative to the largest value: a sum over elements may be tiny at first.
        largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else other.sum()
        return torch.allclose(one, other, 1e-6, 1e-6 * float(largest.nan_to_num()), equal_nan=True)
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
