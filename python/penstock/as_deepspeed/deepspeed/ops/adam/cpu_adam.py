"""Adam: uses the engine's kernels inside an engine and torch's outside."""

from __future__ import annotations

from typing import Any

import torch

from penstock import ConfigError
from penstock.front import optimizer


def refuse(name: str, bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction:
        raise ConfigError(
            f"[deepspeed::{name}] bias_correction=False is not supported: the bias of moments is "
            f"always corrected"
        )
    if amsgrad:
        raise ConfigError(f"[deepspeed::{name}] amsgrad is not supported: use torch.optim.Adam")


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay if `adamw_mode` is True.

    With `fp32_optimizer_states=False` an engine keeps moments in bf16. Raises ConfigError for
    bias_correction=False and amsgrad=True.
    """

    optimizer_id = 0

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse(type(self).__name__, bias_correction, amsgrad)
        super().__init__(
            model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode
        )
        self.adam_w_mode, self.fp32_optimizer_states = adamw_mode, fp32_optimizer_states


optimizer.register(DeepSpeedCPUAdam, "Adam")
