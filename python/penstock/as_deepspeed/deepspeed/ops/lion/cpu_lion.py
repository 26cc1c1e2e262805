"""Lion: uses the engine's kernels inside an engine and torch outside."""

from __future__ import annotations

from typing import Any

from penstock import Lion
from penstock.front import optimizer


class DeepSpeedCPULion(Lion):
    """Lion (arXiv:2302.06675)."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLion(Lion):
    """Lion (arXiv:2302.06675)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


optimizer.register(DeepSpeedCPULion, "Lion")
optimizer.register(FusedLion, "Lion")
