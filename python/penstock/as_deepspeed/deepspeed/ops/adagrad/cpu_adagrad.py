"""Adagrad, on the engine's kernels inside an engine and on torch's outside."""

from __future__ import annotations

from typing import Any

import torch

from penstock import ConfigError
from penstock.front import optimizer


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad. `fp32_optimizer_states` must be True."""

    def __init__(  # noqa: PLR0913 - as DeepSpeed's
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
                "[deepspeed::DeepSpeedCPUAdagrad] no amsgrad, and sums of squares stay in fp32"
            )
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


optimizer.register(DeepSpeedCPUAdagrad, "Adagrad")
