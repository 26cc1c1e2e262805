"""Estimates the memory of model states for each strategy, like DeepSpeed's estimators."""

from __future__ import annotations

import torch

_GIB = 2.0**30


def _print(total: int, largest_layer: int, num_ranks: int, factor: float) -> None:
    """Prints the estimate for numbers of parameters.

    The estimate counts, per parameter, 2 bytes for the weight, 2 for the gradient, and 12 for the
    master and the moments. As in DeepSpeed, `factor` multiplies host memory. A script may pass it;
    the default is 1, because the engine needs only these bytes on the host.
    """
    print(
        f"Memory for parameters, gradients and optimizer state of {total / 1e6:.0f}M parameters "
        f"(largest layer: {largest_layer / 1e6:.0f}M) on {num_ranks} ranks (mixed precision, "
        f"Adam).\n  per rank | host     | strategy"
    )
    rows = [
        (16.0 * total, 0.0, "ZeRO-0"),
        (4.0 * total + 12.0 * total / num_ranks, 0.0, "ZeRO-1"),
        (2.0 * total + 14.0 * total / num_ranks, 0.0, "ZeRO-2"),
        (2.0 * total, 14.0 * total, "ZeRO-2, optimizer on the host"),
        (4.0 * largest_layer + 16.0 * total / num_ranks, 0.0, "ZeRO-3"),
        (4.0 * largest_layer, 16.0 * total, "ZeRO-3, parameters and optimizer on the host"),
    ]
    for device, host, name in rows:
        print(f"  {device / _GIB:7.2f}GB | {host * factor / _GIB:7.2f}GB | {name}")
    print("`penstock plan` predicts the memory for a model and a config, including buffers.")


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Prints the memory that each strategy needs for a model; see `penstock plan`."""
    sizes = {id(one): one.numel() for one in model.parameters()}
    layers = [sum(one.numel() for one in m.parameters(recurse=False)) for m in model.modules()]
    ranks = num_gpus_per_node * num_nodes
    _print(sum(sizes.values()), max(layers, default=0), ranks, additional_buffer_factor)


estimate_zero3_model_states_mem_needs_all_live = estimate_zero2_model_states_mem_needs_all_live


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """The same for a number of parameters."""
    ranks = num_gpus_per_node * num_nodes
    _print(total_params, total_params, ranks, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """The same for numbers of parameters."""
    ranks = num_gpus_per_node * num_nodes
    _print(total_params, largest_layer_params, ranks, additional_buffer_factor)
