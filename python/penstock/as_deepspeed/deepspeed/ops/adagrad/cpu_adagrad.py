"""Adagrad: uses the engine's kernels inside an engine and torch's outside."""

from __future__ import annotations

from typing import Any

import torch

from penstock import ConfigError
from penstock.front import optimizer


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad.

    Raises ConfigError for amsgrad=True and fp32_optimizer_states=False.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ConfigError(
                "[deepspeed::DeepSpeedCPUAdagrad] amsgrad must be False and fp32_optimizer_states "
                "True: sums of squares are always fp32"
            )
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


optimizer.register(DeepSpeedCPUAdagrad, "Adagrad")
