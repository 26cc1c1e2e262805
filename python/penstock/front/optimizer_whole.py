"""Optimizers that look at whole parameters, such as Muon and Adafactor.

In the layout "whole" no shard has a part of a parameter, so such an optimizer steps on the
parameters of its rank, in their own shapes. An update of one parameter must not depend on the
others, which may be on other ranks. As in optimizer_trial.py, a trial shows this on small
parameters: one optimizer has all of them, two others have half of them each, and one has none.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from penstock.front import optimizer_trial as trial
from penstock.front.optimizer_checks import first_problem
from penstock.front.optimizer_methods import Twin

Optimizer = torch.optim.Optimizer
_MOST = 16  # size of a dim of a trial's parameter
_PARTS = (slice(0, None, 2), slice(1, None, 2), slice(0, 0))  # of the parameters of each group


def _small(shape: torch.Size) -> torch.Size:
    return torch.Size(min(size, _MOST) for size in shape)


def samples(optimizer: Optimizer) -> list[trial.Sample]:
    """Returns a sample for each group, kind of attributes and number of dims that occur."""
    found: dict[Hashable, trial.Sample] = {}
    for index, kind, p in trial.sorted_params(optimizer):
        if p.numel() > 0:
            found.setdefault((index, kind, p.ndim), trial.Sample(index, p, _small(p.shape)))
    return list(found.values())


def part_of(optimizer: Optimizer, part: slice) -> Optimizer:
    """Returns a copy of a trial's optimizer with a part of each group's parameters."""
    made = trial.same_as(optimizer)
    kept = []
    for group in made.param_groups:
        group["params"] = group["params"][part]
        kept += group["params"]
    for key in [key for key in made.state if isinstance(key, torch.Tensor)]:
        if not any(key is one for one in kept):
            del made.state[key]
    return made


def differs(whole: Optimizer, parts: list[Optimizer]) -> str:
    """Returns why the parts of a trial's optimizer are not like the whole, or ""."""
    for part, half in zip(_PARTS, parts, strict=False):
        for ours, theirs in zip(whole.param_groups, half.param_groups, strict=True):
            for one, other in zip(ours["params"][part], theirs["params"], strict=True):
                if not trial.same([other], [one]):
                    return "its step on one parameter depends on the others"
                states = [
                    [*trial.leaves(of.state.get(p, {}))] for of, p in ((half, other), (whole, one))
                ]
                if not trial.same(*states):
                    return "its state of one parameter depends on the others"
        for what, of in (("options", trial.options), ("attributes", _attached)):
            if not trial.same([*trial.leaves(of(half))], [*trial.leaves(of(whole))]):
                return f"the {what} that it sets depend on all parameters"
    return ""


def _attached(optimizer: Optimizer) -> dict[str, Any]:
    # An inner optimizer shares the groups and the state.
    return {k: v for k, v in trial.attached(optimizer).items() if not isinstance(v, Optimizer)}


def _try(optimizer: Optimizer, scale: float) -> str:
    chosen = samples(optimizer)
    generator = torch.Generator().manual_seed(1)
    starts = [
        [scale * torch.randn(one.shape, generator=generator) for _ in range(2)] for one in chosen
    ]

    def made(part: slice) -> Optimizer:
        params = [[torch.nn.Parameter(one.clone()) for one in both[part]] for both in starts]
        return trial.on(optimizer, [*zip(chosen, params, strict=True)])

    whole, parts = made(slice(None)), [made(part) for part in _PARTS]
    values = [one.detach().clone() for one in trial.params_of(whole)]
    before = trial.windows(trial.params_of(whole))
    for kind in trial.GRADIENTS:
        given = [trial.gradient(kind, one, generator) for one in trial.params_of(whole)]
        with trial.Watch(trial.params_of(whole)):
            trial.step(whole, zip(trial.params_of(whole), given, strict=True))
            for part, one in zip(_PARTS[:2], parts, strict=False):
                of_part = _of_part(whole, given, part)
                trial.step(one, zip(trial.params_of(one), of_part, strict=True))
        if trial.windows(trial.params_of(whole)) != before:
            return "it gives a parameter new memory (p.data = x); use p.data.copy_(x)"
        problem = differs(whole, parts[:2])
        if problem:
            return problem
        try:
            parts[2].step()
        except Exception as error:  # noqa: BLE001 - any error of the user's step()
            return f"on a rank with none of the parameters it raised {trial.told(error)}"
        problem = differs(whole, parts)
        if problem:
            return problem
    if all(map(torch.equal, trial.params_of(whole), values)):
        return "in a trial it changed no parameter of param_groups"
    return ""


def _of_part(whole: Optimizer, values: list[torch.Tensor], part: slice) -> list[torch.Tensor]:
    """Returns the values, one for each parameter of the whole, of a part's parameters."""
    made: list[torch.Tensor] = []
    at = 0
    for group in whole.param_groups:
        end = at + len(group["params"])
        made += values[at:end][part]
        at = end
    return made


def problem_on_whole(optimizer: Optimizer) -> str:
    """Returns why the optimizer cannot step on some of the parameters, each whole, or ""."""
    return first_problem(optimizer, lambda scale: _try(optimizer, scale), "small parameters")


class WholeTwin(Twin):
    """The twin of an optimizer on whole parameters: its parts have some of them."""

    PARTS = "some parameters"
    DIFFERS = "changes a parameter differently if the others are not there"

    def _samples(self, optimizer: Optimizer) -> list[trial.Sample]:
        return [one for one in samples(optimizer) for _ in range(2)]

    def _parts(self, optimizer: Optimizer) -> list[Optimizer]:
        return [part_of(optimizer, part) for part in _PARTS]

    def _of_part(self, values: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        return _of_part(self.optimizer, values, _PARTS[which])

    def _follow_state(self, *_: Any) -> None:
        """Does nothing, because the state may have any shape. See loaded()."""

    def loaded(self) -> None:
        """Takes a step, so that the twin has a state if the loaded optimizer has one."""
        try:
            with torch.random.fork_rng(devices=[]):
                params = trial.params_of(self.optimizer)
                trial.step(self.optimizer, zip(params, self._gradients(), strict=True))
        except Exception as error:  # noqa: BLE001 - the user's step() raises it, too
            self._failure = f"its step() raised {trial.told(error)}"

    def _agrees(self, whole: Optimizer, parts: list[Optimizer]) -> bool:
        return not differs(whole, parts)

    def _same_results(self, parts: list[list[Any]], whole: list[Any]) -> bool:
        return all(trial.same(part, whole) for part in parts)
