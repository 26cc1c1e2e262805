"""The optimizer class of fp16 and bf16 at stage 0, with FusedAdam."""

from __future__ import annotations

from ..base_optimizer import ZeROOptimizer


class FP16_Optimizer(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer with fp32 masters; nothing is sharded."""
