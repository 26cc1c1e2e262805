"""Names of what a config's zero_optimization says."""

import enum
import types
from typing import Any


class ZeroStageEnum(int, enum.Enum):
    """What is sharded: nothing, the optimizer's state, gradients too, parameters too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(types.SimpleNamespace):
    """A config's section, by its keys."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{"stage": 0, **keys})
