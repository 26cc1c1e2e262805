"""DeepSpeed's learning rate schedules, for the `scheduler` section of its config and for scripts.

A schedule sets the rate in its constructor and at each `step()`. The engine calls `step()` after
each applied update, so the first two updates run at the lowest rate. The formulas are in C++
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
    """Computes a rate for each parameter group from the number of steps so far.

    Args:
        optimizer: a torch optimizer, or an object with a torch optimizer as `.optimizer`.
        given: parameters of the schedule, in DeepSpeed's order.
        last_batch_iteration: the step to continue from; -1: starts anew and sets the groups' rates.
        params: parameters by name. A list has a value for each parameter group.

    Raises:
        ConfigError: if a parameter is unknown, missing, or has a value that is not allowed.
        TypeError: if `optimizer` is not an optimizer, or a parameter is given twice.
        ValueError: if a list does not have one value for each parameter group.
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
                f"[front::{self.kind}] a {type(optimizer).__name__} is not a torch.optim.Optimizer"
            )
        names = (*self.names, "last_batch_iteration")
        if len(given) > len(names) or set(params) & set(names[: len(given)]):
            raise TypeError(
                f"[front::{self.kind}] too many arguments were given, or one of them twice. The "
                f"arguments are {', '.join(names)}"
            )
        params |= dict(zip(names, given, strict=False))
        last_batch_iteration = params.pop("last_batch_iteration", last_batch_iteration)
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        params = self._completed(params)
        if params.get("warmup_num_steps", 0) is None:
            raise ConfigError(f"[front::{self.kind}] warmup_num_steps is None: pass a whole number")
        self._params = params
        self._of_groups = [
            _penstock.DeepSpeedSchedule(self.kind, self._of_group(params, index))
            for index in range(len(optimizer.param_groups))
        ]
        self._last_lr: list[float] = []
        if last_batch_iteration == -1:
            self._set()

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        """Returns the parameters with defaults that depend on the optimizer."""
        return params

    def _of_group(self, params: Mapping[str, Any], index: int) -> dict[str, float]:
        chosen: dict[str, float] = {}
        for name, value in params.items():
            if isinstance(value, (list, tuple)):
                if len(value) != len(self.optimizer.param_groups):
                    raise ValueError(
                        f"[front::{self.kind}] {name} has {len(value)} values, but there are "
                        f"{len(self.optimizer.param_groups)} parameter groups. Give one value for "
                        f"each group"
                    )
                value = value[index]
            if name == "warmup_type":
                if value not in _WARMUP_TYPES:
                    warnings.warn(
                        f'[front::{self.kind}] warmup_type is {value!r}, so "log" is used. '
                        f'Allowed: "log", "linear"',
                        stacklevel=4,
                    )
                value = _WARMUP_TYPES.get(value, 0.0)
            if value is not None:
                chosen[name] = float(value)
        return chosen

    def _value(self, name: str) -> Any:
        """Returns a parameter, or its default."""
        default = _penstock.DeepSpeedSchedule.all()[self.kind].get(name)
        value = self._params.get(name)
        return default if value is None else value

    def _per_group(self, name: str) -> list[float]:
        value, count = self._value(name), len(self.optimizer.param_groups)
        return list(value) if isinstance(value, (list, tuple)) else [float(value)] * count

    def _base_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Returns a rate for each parameter group, for the next update."""
        return [one.lr(self.last_batch_iteration) for one in self._of_groups]

    def get_last_lr(self) -> list[float]:
        """Returns the last rate of each group. Raises RuntimeError if none was set yet."""
        if not self._last_lr:
            raise RuntimeError(f"[front::{self.kind}] no rate was set yet. Call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one step, or to `last_batch_iteration`, and sets the groups' rates."""
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


class _Warmup(_Schedule):
    """The parameters of a warm-up as attributes."""

    @property
    def warmup_num_steps(self) -> int:
        return max(2, int(self._value("warmup_num_steps")))

    @property
    def warmup_type(self) -> str:
        given = self._params.get("warmup_type", "log")
        return given if given in _WARMUP_TYPES else "log"

    @property
    def min_lrs(self) -> list[float]:
        return self._per_group("warmup_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        return self._per_group("warmup_max_lr")


class WarmupLR(_Warmup):
    """Raises the rate from `warmup_min_lr` (0) to `warmup_max_lr` (the group's rate) over
    `warmup_num_steps` (1000), then keeps it. `warmup_type`: "log" or "linear"."""

    kind = "WarmupLR"
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")

    def _completed(self, params: dict[str, Any]) -> dict[str, Any]:
        if params.get("warmup_max_lr") is None:
            params["warmup_max_lr"] = self._base_lrs()
        return params


class WarmupDecayLR(_Warmup):
    """Warms up like WarmupLR (to 0.001), then decays linearly to 0 at `total_num_steps`."""

    kind = "WarmupDecayLR"
    names = ("total_num_steps", *WarmupLR.names)


class WarmupCosineLR(_Warmup):
    """Multiplies the groups' rates by a ratio. The ratio rises from `warmup_min_ratio` (0) to 1
    over `warmup_num_steps` (1000), then follows half a cosine down to `cos_min_ratio` (0.0001) at
    `total_num_steps`."""

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

    def get_lr_ratio(self) -> float:
        """Returns the factor of the groups' rates for the next update."""
        unit = _penstock.DeepSpeedSchedule(
            self.kind, self._of_group(self._params | {"base_lr": 1.0}, 0)
        )
        return float(unit.lr(self.last_batch_iteration))


class OneCycle(_Schedule):
    """The 1cycle policy (arXiv:1803.09820). The rate rises from `cycle_min_lr` to `cycle_max_lr`
    over `cycle_first_step_size` (2000) steps and falls again. Momentum (`cycle_min_mom`,
    `cycle_max_mom`) moves in the opposite direction. After the cycle the rate decays, if
    `decay_step_size` is not 0."""

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
        if (params.get("cycle_second_step_size") or 0) < 0:
            raise ConfigError(
                f"[front::OneCycle] cycle_second_step_size is {params['cycle_second_step_size']}; "
                f"allowed: a whole number >= 0, or None, which means cycle_first_step_size"
            )
        wanted = bool(params.get("cycle_momentum", True))
        self.cycle_momentum = wanted and "betas" in self.optimizer.defaults
        if wanted and not self.cycle_momentum:
            warnings.warn(
                f"[front::OneCycle] {type(self.optimizer).__name__} has no betas, so its momentum "
                f"does not change",
                stacklevel=3,
            )
        return params

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which the rate rises."""
        first = float(self._value("cycle_first_step_size"))
        second = self._params.get("cycle_second_step_size")
        return first / (first + (first if second is None else float(second)))

    @property
    def min_lrs(self) -> list[float]:
        return self._per_group("cycle_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        return self._per_group("cycle_max_lr")

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the groups' betas for the next update, or None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration == -1:  # the groups have the lowest momentum until step()
            return [(one, 0.99) for one in self._per_group("cycle_max_mom")]
        return [(one.momentum(self.last_batch_iteration), 0.99) for one in self._of_groups]

    def _set(self) -> None:
        super()._set()
        if self.cycle_momentum:
            for group, one in zip(self.optimizer.param_groups, self._of_groups, strict=True):
                group["betas"] = (one.momentum(self.last_batch_iteration), 0.99)


class LRRangeTest(_Schedule):
    """The learning rate range test (arXiv:1803.09820), to find the highest rate that still trains.

    The rate begins at `lr_range_test_min_lr` (0.001). Every `lr_range_test_step_size` (2000) steps
    it rises by `lr_range_test_step_rate` (1) times `lr_range_test_min_lr`."""

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
    """Returns a function that builds the scheduler of a section (JSON) for an optimizer.

    Raises ConfigError if neither this module nor torch has a scheduler of that name.
    """
    section = json.loads(text)
    name, params = section["type"], section.get("params") or {}
    params = {key: value for key, value in params.items() if value != "auto"}
    made: Any = BY_NAME.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if made is None:
        raise ConfigError(
            f'[front::initialize] "scheduler.type" is "{name}". Allowed: {", ".join(BY_NAME)}, or '
            f"a class of torch.optim.lr_scheduler"
        )

    def build(optimizer: Any) -> Any:
        try:
            return made(optimizer, **params)
        except TypeError as error:
            raise ConfigError(f'[front::initialize] "scheduler.params": {error}') from error

    return build
