"""Arguments and config sections of learning rate schedules (see penstock.front.schedules)."""

from __future__ import annotations

import argparse
from typing import Any

from .. import _table

_NAMES: list[str] = _table.attributes(__name__)("VALID_LR_SCHEDULES")
_ARGUMENTS: dict[str, Any] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds an option for each parameter of a schedule to a script's parser."""
    group = parser.add_argument_group("Convergence Tuning", "parameters of a schedule")
    group.add_argument("--lr_schedule", type=str, default=None, help="name of the schedule")
    for name, default in _ARGUMENTS.items():
        kind: Any = (lambda text: text == "True") if isinstance(default, bool) else type(default)
        group.add_argument(f"--{name}", type=kind, default=default)
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str]:
    """Returns the config section for the arguments of add_tuning_arguments(), and an error text."""
    name = getattr(args, "lr_schedule", None)
    if name not in _NAMES:
        return None, f"{name!r} is not a schedule; allowed: {', '.join(_NAMES)}"
    prefixes = {"LRRangeTest": ("lr_range_test",), "OneCycle": ("cycle", "decay")}
    mine = prefixes.get(name, ("warmup", "cos"))
    params = {
        key: getattr(args, key) for key in _ARGUMENTS if key.startswith(mine) and hasattr(args, key)
    }
    return {"type": name, "params": params}, ""


def get_lr_from_config(config: dict[str, Any]) -> tuple[Any, str]:
    """Returns the highest learning rate in a config section, and an error text."""
    params = config.get("params")
    if config.get("type") not in _NAMES or params is None:
        return None, "the section has no valid type, or no params"
    for name in ("lr_range_test_min_lr", "cycle_max_lr", "warmup_max_lr"):
        if name in params:
            return params[name], ""
    return None, f"{config['type']} has no learning rate, only factors of the optimizer's rate"
