"""DeepSpeed's learning rate schedules, for a `scheduler` section of its config and for users.

They set the rate when they are built and at each `step()`, which the engine calls after each
applied step; the first two updates run at the lowest rate. The formulas are in C++
(deepspeed_schedule.cpp).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from penstock._native import ConfigError, _penstock

_WARMUP_TYPES = {"log": 0.0, "linear": 1.0}


class _Schedule:
    """A rate for each parameter group, by the number of steps so far.

    Args:
        optimizer: of torch, or something that has one as `.optimizer`.
        given: parameters of the schedule, in DeepSpeed's order.
        last_batch_iteration: where to go on; -1 begins, and sets the groups' rates.
        params: parameters by name; lists have a value for each parameter group.

    Raises:
        ConfigError: a parameter that there is not, is missing, or cannot work.
    """

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    def __init__(
        self, optimizer: Any, *given: Any, last_batch_iteration: int = -1, **params: Any
    ) -> None:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) and isinstance(
            inner, torch.optim.Optimizer
        ):
            optimizer = inner
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"[front::{self.kind}] a {type(optimizer).__name__} is no torch.optim.Optimizer"
            )
        names = (*self.names, "last_batch_iteration")
        if len(given) > len(names) or set(params) & set(names[: len(given)]):
            raise TypeError(f"[front::{self.kind}] takes {', '.join(names)}, each once")
        params |= dict(zip(names, given, strict=False))
        last_batch_iteration = params.pop("last_batch_iteration", last_batch_iteration)
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        params = self._completed(params)
        self._of_groups = [
            _penstock.DeepSpeedSchedule(self.kind, self._of_group(params, index))
            for index in range(len(optimizer.param_groups))
        ]
        self._last_lr: list[float] = []
        if last_batch_iteration == -1:
            self._set()

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        """With what follows from the optimizer."""
        return params

    def _of_group(self, params: Mapping[str, Any], index: int) -> dict[str, float]:
        chosen: dict[str, float] = {}
        for name, value in params.items():
            if isinstance(value, (list, tuple)):
                if len(value) != len(self.optimizer.param_groups):
                    raise ValueError(
                        f"[front::{self.kind}] {name} has {len(value)} values for "
                        f"{len(self.optimizer.param_groups)} parameter groups"
                    )
                value = value[index]
            if name == "warmup_type":
                if value not in _WARMUP_TYPES:
                    warnings.warn(
                        f'[front::{self.kind}] warmup_type is {value!r}: "log" is taken',
                        stacklevel=4,
                    )
                value = _WARMUP_TYPES.get(value, 0.0)
            if value is not None:
                chosen[name] = float(value)
        return chosen

    def _base_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """A rate for each parameter group, for the next update."""
        return [one.lr(self.last_batch_iteration) for one in self._of_groups]

    def get_last_lr(self) -> list[float]:
        """What the groups were set to last."""
        if not self._last_lr:
            raise RuntimeError(f"[front::{self.kind}] no rate was set yet: call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on by one, or to `last_batch_iteration`, and sets the groups."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


class WarmupLR(_Schedule):
    """From `warmup_min_lr` (0) to `warmup_max_lr` (the group's rate) over `warmup_num_steps`
    (1000), then constant. `warmup_type`: "log" or "linear"."""

    kind = "WarmupLR"
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        if params.get("warmup_max_lr") is None:
            params["warmup_max_lr"] = self._base_lrs()
        return params


class WarmupDecayLR(_Schedule):
    """As WarmupLR (to 0.001), then linear to 0 at `total_num_steps`."""

    kind = "WarmupDecayLR"
    names = ("total_num_steps", *WarmupLR.names)


class WarmupCosineLR(_Schedule):
    """Shares of the groups' rates: from `warmup_min_ratio` (0) to 1 over `warmup_num_steps` (1000),
    then half a cosine down to `cos_min_ratio` (0.0001) at `total_num_steps`."""

    kind = "WarmupCosineLR"
    names = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
    )

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        self.org_lrs = self._base_lrs()
        return params | {"base_lr": self.org_lrs}


class OneCycle(_Schedule):
    """arXiv:1803.09820: up from `cycle_min_lr` to `cycle_max_lr` over `cycle_first_step_size`
    (2000) and down again, momentum (`cycle_min_mom`, `cycle_max_mom`) the other way round; then the
    rate decays, where `decay_step_size` is not 0."""

    kind = "OneCycle"
    names = (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    )

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        wanted = bool(params.get("cycle_momentum", True))
        self.cycle_momentum = wanted and "betas" in self.optimizer.defaults
        if wanted and not self.cycle_momentum:
            warnings.warn(
                f"[front::OneCycle] {type(self.optimizer).__name__} has no betas: its momentum "
                f"stays",
                stacklevel=3,
            )
        return params

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The groups' betas for the next update; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(one.momentum(self.last_batch_iteration), 0.99) for one in self._of_groups]

    def _set(self) -> None:
        super()._set()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


class LRRangeTest(_Schedule):
    """arXiv:1803.09820: from `lr_range_test_min_lr` (0.001) up by `lr_range_test_step_rate` (1) of
    it every `lr_range_test_step_size` (2000) steps, to find the highest rate that still trains."""

    kind = "LRRangeTest"
    names = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    )


BY_NAME: dict[str, type[_Schedule]] = {
    one.kind: one for one in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def from_section(text: str) -> Callable[[Any], Any]:
    """What builds the scheduler of a config's `scheduler` section (JSON) for an optimizer.

    Raises ConfigError for a name that neither this module nor torch has.
    """
    section = json.loads(text)
    name, params = section["type"], section.get("params") or {}
    params = {key: value for key, value in params.items() if value != "auto"}
    made: Any = BY_NAME.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if made is None:
        raise ConfigError(
            f'[front::initialize] "scheduler.type" is "{name}"; allowed: {", ".join(BY_NAME)}, or '
            f"a class of torch.optim.lr_scheduler"
        )

    def build(optimizer: Any) -> Any:
        try:
            return made(optimizer, **params)
        except TypeError as error:
            raise ConfigError(f'[front::initialize] "scheduler.params": {error}') from error

    return build
