"""For isinstance(): the engine's optimizers are none of these."""


class BF16_Optimizer:  # noqa: N801 - DeepSpeed's name
    """Never made."""
