"""The optimizer class of ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch

from ...utils.z3_leaf_module import apply_zero_leaf_module_config, get_z3_leaf_modules
from ..base_optimizer import ZeROOptimizer
from .leaf_module_config import DeepSpeedZeroLeafModuleConfig
from .parameter_offload import DeepSpeedZeRoOffload
from .partition_parameters import mark


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of ZeRO-3: parameters, gradients and optimizer state are sharded."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(engine, optimizer)
        self.parameter_offload = DeepSpeedZeRoOffload(engine.module)

    @property
    def leaf_parameters(self) -> dict[torch.nn.Module, list[torch.nn.Parameter]]:
        """The parameters of each leaf module, as marked when the engine was created."""
        found: dict[torch.nn.Module, list[torch.nn.Parameter]] = {}
        for param in self._ours().module.parameters():
            if hasattr(param, "ds_z3_leaf_module"):
                found.setdefault(param.ds_z3_leaf_module, []).append(param)
        return found


def mark_model(model: torch.nn.Module, settings: Any) -> None:
    """Adds DeepSpeed's attributes to the parameters, and marks the config's leaf modules."""
    section = getattr(settings, "leaf_module", None) or {}
    apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig(**section))
    leaves = {id(p): module for module in get_z3_leaf_modules(model) for p in module.parameters()}
    for param in model.parameters():
        mark(param, bool(getattr(settings, "enable_sanity_checks", False)))
        if id(param) in leaves:
            param.ds_z3_leaf_module = leaves[id(param)]  # type: ignore[attr-defined]
