"""The difficulty of samples as a function of the step (arXiv:2108.06084)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from penstock import ConfigError

_NEEDED = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "custom": (),
}


class CurriculumScheduler:
    """Gives the difficulty, such as a sequence length, of each step. The script applies it.

    Args:
        config: min_difficulty, max_difficulty, schedule_type ("fixed_discrete", "fixed_linear",
            "fixed_root" or "custom") and schedule_config with the keys of that type.

    Raises ConfigError if a key is missing or the type is unknown.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        kind = config.get("schedule_type")
        if kind not in _NEEDED:
            raise ConfigError(
                f"[deepspeed::CurriculumScheduler] schedule_type is {kind!r}; allowed: "
                f"{', '.join(_NEEDED)}"
            )
        options = config.get("schedule_config", {})
        missing = [one for one in ("min_difficulty", "max_difficulty") if one not in config]
        missing += [f"schedule_config.{one}" for one in _NEEDED[kind] if one not in options]
        if missing:
            raise ConfigError(
                f"[deepspeed::CurriculumScheduler] schedule_type {kind} also needs "
                f"{', '.join(missing)}"
            )
        self.state = {
            key: config[key] for key in ("min_difficulty", "max_difficulty", "schedule_type")
        }
        self.state["current_difficulty"] = config["min_difficulty"]
        if _NEEDED[kind]:
            self.state["schedule_config"] = options
        if kind == "fixed_discrete" and len(options["difficulty"]) != len(options["max_step"]) + 1:
            raise ConfigError(
                "[deepspeed::CurriculumScheduler] schedule_config.difficulty must have one element "
                "more than max_step, because the last difficulty applies until the end"
            )
        self.custom_get_difficulty: Callable[[int], Any] | None = None

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Sets the function that maps a step to its difficulty, for the type "custom"."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        kind, options = self.state["schedule_type"], self.state.get("schedule_config", {})
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError(
                    '[deepspeed::CurriculumScheduler] schedule_type is "custom", but it has no '
                    "function: call set_custom_get_difficulty() first"
                )
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            passed = sum(global_steps > last for last in options["max_step"])
            return options["difficulty"][passed]
        return self._rounded(global_steps, options.get("root_degree", 1))

    def _rounded(self, step: int, degree: float) -> Any:
        """Returns a difficulty that grows with a root of the step, in units of difficulty_step."""
        options, low = self.state["schedule_config"], self.state["min_difficulty"]
        high, unit = self.state["max_difficulty"], options["difficulty_step"]
        share = (step / options["total_curriculum_step"]) ** (1.0 / degree)
        reached = math.floor(low + share * (high - low)) // unit * unit
        return min(high, max(reached, math.ceil(low / unit) * unit))

    def update_difficulty(self, global_steps: int) -> Any:
        """Sets and returns the current difficulty, which stays constant once it is the highest."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]

    def get_current_difficulty(self) -> Any:
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state
