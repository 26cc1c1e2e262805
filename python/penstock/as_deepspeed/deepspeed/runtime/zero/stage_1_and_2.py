"""The optimizer class and the memory estimates of ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import torch

from ..base_optimizer import ZeROOptimizer
from .estimates import cold, live


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of ZeRO-1 (optimizer state is sharded) and ZeRO-2 (gradients, too)."""


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the memory that each strategy needs for a model; see `penstock plan`."""
    live(model, num_gpus_per_node * num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same as ..._all_live, for a number of parameters."""
    cold(total_params, total_params, num_gpus_per_node * num_nodes)
