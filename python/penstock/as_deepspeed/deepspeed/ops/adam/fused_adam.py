"""Adam: uses the engine's kernels inside an engine and torch's outside."""

from __future__ import annotations

from typing import Any

import torch

from penstock.front import optimizer

from .cpu_adam import refuse


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay if `adam_w_mode` is True.

    Raises ConfigError for bias_correction=False and amsgrad=True.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedAdam", bias_correction, amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.adam_w_mode = 1 if adam_w_mode else 0


optimizer.register(FusedAdam, "Adam")
