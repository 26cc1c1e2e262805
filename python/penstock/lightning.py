"""Lightning: `Trainer(strategy=PenstockStrategy(stage=3))`.

This is Lightning's DeepSpeed strategy on Penstock. It does not need CUDA: engines train where the
trainer does. Importing this module calls penstock.deepspeed.install().
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from penstock import deepspeed as as_deepspeed

as_deepspeed.install()

import lightning.fabric.strategies.deepspeed as of_fabric  # noqa: E402
import lightning.pytorch.strategies.deepspeed as of_pytorch  # noqa: E402
from lightning.fabric.utilities.seed import reset_seed  # noqa: E402


def _quiet(options: dict[str, Any]) -> dict[str, Any]:
    return {"logging_level": logging.WARNING, **options}


def _train_on(device: torch.device) -> None:
    """For a trainer on the CPU, makes get_accelerator() return the CPU; otherwise the machine's
    accelerator."""
    of_deepspeed = importlib.import_module("deepspeed.accelerator.real_accelerator")
    on_cpu = of_deepspeed.CPU_Accelerator() if device.type == "cpu" else None
    of_deepspeed.set_accelerator(on_cpu)


class PenstockStrategy(of_pytorch.DeepSpeedStrategy):
    """The strategy for lightning.pytorch.Trainer.

    Args:
        options: arguments of Lightning's DeepSpeedStrategy: `stage`, `offload_optimizer`, ...
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**_quiet(options))

    def setup_environment(self) -> None:
        # Skips the method of DeepSpeedStrategy, which needs CUDA.
        _train_on(self.root_device)
        super(of_pytorch.DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class PenstockFabricStrategy(of_fabric.DeepSpeedStrategy):
    """The strategy for lightning.fabric.Fabric, with the arguments of PenstockStrategy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**_quiet(options))

    def setup_environment(self) -> None:
        _train_on(self.root_device)
        super(of_fabric.DeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True


__all__ = ["PenstockFabricStrategy", "PenstockStrategy"]
