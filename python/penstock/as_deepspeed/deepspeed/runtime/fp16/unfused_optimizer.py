"""For isinstance(): the engine's optimizers are none of these."""


class FP16_UnfusedOptimizer:  # noqa: N801 - DeepSpeed's name
    """Never made."""
