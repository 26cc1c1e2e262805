"""Types of the config section zero_optimization."""

import enum
import types
from typing import Any


class ZeroStageEnum(int, enum.Enum):
    """The stages. Each one shards more: nothing, optimizer state, gradients, parameters."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(types.SimpleNamespace):
    """The section as an object with its keys as attributes."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{"stage": 0, **keys})
