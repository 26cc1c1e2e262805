"""Checks of users' optimizers, by the trials of optimizer_trial.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

import torch

from penstock._native import ConfigError
from penstock.front.optimizer_trial import (
    CUT,
    SCALES,
    STEPS,
    CannotTry,
    Optimizer,
    Sample,
    check_state,
    in_slices,
    samples,
    sorted_params,
    told,
)

_TRIED_NUMEL = 1 << 22  # elements of the largest parameter that is tried


def first_problem(optimizer: Optimizer, attempt: Callable[[float], str], what: str) -> str:
    """Returns the first problem of `attempt(scale)`, or "". `what`: the parameters that it uses.

    Raises ConfigError for state that no shard can have.
    """
    check_state(optimizer)
    with torch.random.fork_rng(devices=[]):
        for scale in SCALES:
            try:
                check_inner(optimizer)
                problem = attempt(scale)
            except ConfigError:
                raise
            except CannotTry as error:
                problem = f"it {error}"
            except Exception as error:  # noqa: BLE001 - this class cannot step on them
                problem = f"on {what} it raised {told(error)}"
            if problem:
                return problem
    return ""


def check_elementwise(optimizer: Optimizer, others: str) -> None:
    """Raises ConfigError unless the optimizer updates slices of a parameter like the whole.

    A step on small parameters must give the same values as steps on their flat slices, within rtol
    1e-6 and 1e-5 of the largest change. `others` names the optimizers to use instead.
    """
    problem = first_problem(
        optimizer,
        lambda scale: in_slices(optimizer, samples(optimizer), scale, CUT, STEPS),
        "slices of a parameter",
    )
    if problem:
        raise ConfigError(
            f"[front::initialize] {type(optimizer).__name__} is not elementwise ({problem}), so it "
            f"cannot run on shards. Use {others} or another elementwise optimizer"
        )


def check_inner(optimizer: Optimizer) -> None:
    for name in ("param_groups", "state"):
        if isinstance(getattr(type(optimizer), name, None), property):
            raise CannotTry(
                f'defines "{name}" as a property, so the engine cannot replace it by shards: set '
                f"self.{name} in the constructor, or pass the inner optimizer"
            )
    groups = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        inner = value if isinstance(value, (list, tuple)) else [value]
        for one in inner:
            if isinstance(one, Optimizer) and any(id(g) not in groups for g in one.param_groups):
                raise CannotTry(
                    f'keeps another optimizer in its attribute "{name}", with parameter groups of '
                    f"its own: build that one from self.param_groups"
                )


def _shrunk(shape: torch.Size) -> torch.Size:
    dims = [*shape]
    while torch.Size(dims).numel() > _TRIED_NUMEL:
        largest = dims.index(max(dims))
        dims[largest] = (dims[largest] + 1) // 2
    return torch.Size(dims)


def check_sizes(optimizer: Optimizer, num_shards: int, others: str) -> None:
    """Raises ConfigError if the optimizer's rule depends on the shape or size of a parameter.

    Compares parameters of the shapes that occur with their shards. The shards are flat and
    `num_shards` times smaller.
    """
    found: dict[torch.Size, dict[Hashable, Sample]] = defaultdict(dict)
    for index, kind, p in sorted_params(optimizer):
        shape = _shrunk(p.shape)
        if shape.numel() > 0:
            found[shape].setdefault((index, kind), Sample(index, p, shape))
    tried = sorted(found, key=torch.Size.numel)
    with torch.random.fork_rng(devices=[]):
        for shape in {*tried[:: max(1, len(tried) // 8)], *tried[-1:]}:
            at = max(1, shape.numel() // num_shards)
            problem = in_slices(optimizer, [*found[shape].values()], 1.0, at, steps=2)
            if problem:
                raise ConfigError(
                    f"[front::initialize] {type(optimizer).__name__} is not elementwise (for a "
                    f"parameter of {shape.numel()} elements, {problem}), so it cannot run on "
                    f'shards. Set "optimizer.layout" to "whole", or use {others}'
                )
