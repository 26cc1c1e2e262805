"""A class for isinstance() checks. No optimizer of the engine is an instance of it."""


class FP16_UnfusedOptimizer:  # noqa: N801 - DeepSpeed's name
    """Never instantiated."""
