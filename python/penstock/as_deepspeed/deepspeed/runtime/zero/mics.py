"""MiCS: parameters sharded inside groups of ranks (the config's mics_shard_size)."""

from .partition_parameters import Init


class MiCS_Init(Init):  # noqa: N801 - DeepSpeed's name
    """The same as zero.Init."""
