"""The Linear layer under the name that models for ZeRO-3 use."""

from __future__ import annotations

import torch


class LinearModuleForZeroStage3(torch.nn.Linear):
    """torch's layer: the engine saves no gathered weights for backward."""


def zero3_linear_wrap(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight, bias)
