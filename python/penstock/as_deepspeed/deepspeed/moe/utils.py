"""Queries about expert parameters."""

from __future__ import annotations

from typing import Any

import torch


def is_moe_param(param: torch.Tensor) -> bool:
    """Returns False: no parameter belongs to an expert that differs between ranks."""
    return False


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: Any = None
) -> Any:
    """Returns the same groups, since there are no expert parameters to separate."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
