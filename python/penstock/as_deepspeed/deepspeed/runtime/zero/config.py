"""Types of the config section zero_optimization."""

import enum


class ZeroStageEnum(int, enum.Enum):
    """The stages. Each one shards more: nothing, optimizer state, gradients, parameters."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
