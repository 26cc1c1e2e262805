"""The optimizer class and the memory estimates of ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch

from ..base_optimizer import ZeROOptimizer
from .estimates import cold, live
from .parameter_offload import DeepSpeedZeRoOffload


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of ZeRO-3: parameters, gradients and optimizer state are sharded."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(engine, optimizer)
        self.parameter_offload = DeepSpeedZeRoOffload(engine.module)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the memory that each strategy needs for a model; see `penstock plan`."""
    live(model, num_gpus_per_node * num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same as ..._all_live, for numbers of parameters."""
    cold(total_params, largest_layer_params, num_gpus_per_node * num_nodes)
