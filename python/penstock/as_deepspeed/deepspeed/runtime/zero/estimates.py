"""Estimates the memory of model states for each strategy, like DeepSpeed's estimators."""

from __future__ import annotations

import torch

_GIB = 2.0**30


def live(model: torch.nn.Module, num_ranks: int) -> None:
    """Prints the estimate for a model."""
    sizes = {id(one): one.numel() for one in model.parameters()}
    layers = [sum(one.numel() for one in m.parameters(recurse=False)) for m in model.modules()]
    cold(sum(sizes.values()), max(layers, default=0), num_ranks)


def cold(total: int, largest_layer: int, num_ranks: int) -> None:
    """Prints the estimate for numbers of parameters.

    The estimate counts, per parameter, 2 bytes for the weight, 2 for the gradient, and 12 for the
    master and the moments.
    """
    print(
        f"Memory for parameters, gradients and optimizer state of {total / 1e6:.0f}M parameters, "
        f"the largest layer {largest_layer / 1e6:.0f}M, on {num_ranks} ranks (mixed precision, "
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
        print(f"  {device / _GIB:7.2f}GB | {host / _GIB:7.2f}GB | {name}")
    print("`penstock plan` predicts the memory for a model and a config, including buffers.")
