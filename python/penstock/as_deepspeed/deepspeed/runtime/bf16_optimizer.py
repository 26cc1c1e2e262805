"""A class for isinstance() checks. No optimizer of the engine is an instance of it."""


class BF16_Optimizer:  # noqa: N801 - DeepSpeed's name
    """Never instantiated."""
