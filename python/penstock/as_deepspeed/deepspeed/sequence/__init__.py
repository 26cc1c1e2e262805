"""Sequence parallelism, which is not built yet."""
