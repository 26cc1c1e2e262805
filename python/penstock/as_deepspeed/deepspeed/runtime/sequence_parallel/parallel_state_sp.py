"""Groups of ranks that share sequences. This module is an `mpu` for `deepspeed.initialize()`.

The ranks of a group are neighbours: with size 2, ranks 0 and 1 form one group, ranks 2 and 3 the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from penstock import ConfigError

from ..pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology


class SequenceGrid:
    """This rank's place among sequence ranks and data ranks. All ranks must create it."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if size < 1 or world % size:
            raise ConfigError(
                f"[deepspeed] sequence_parallel_size is {size}; allowed: a divisor of the number "
                f"of ranks, {world}"
            )
        places = PipeModelDataParallelTopology(num_pp=1, num_mp=size, num_dp=world // size)
        grid, self.world = PipelineParallelGrid(places), dist.group.WORLD
        self.get_sequence_parallel_group = grid.get_model_parallel_group
        self.get_sequence_parallel_world_size = grid.get_model_parallel_world_size
        self.get_sequence_parallel_rank = grid.get_model_parallel_rank
        self.get_data_parallel_group = grid.get_data_parallel_group
        self.get_data_parallel_world_size = grid.get_data_parallel_world_size
        self.get_data_parallel_rank = grid.get_data_parallel_rank

    def get_sequence_data_parallel_group(self) -> Any:
        """Returns the group of all ranks: state is sharded and gradients averaged over it."""
        return self.world

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.world)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self.world)


_grid: SequenceGrid | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Creates the groups; a call with another size creates new ones. All ranks must call it.

    Raises ConfigError if the size does not divide the number of ranks.
    """
    global _grid  # noqa: PLW0603 - DeepSpeed's mpu is a module, too
    known = _grid is not None and _grid.world is dist.group.WORLD
    if not known or get_sequence_parallel_world_size() != sequence_parallel_size:
        _grid = SequenceGrid(sequence_parallel_size)


def _made() -> SequenceGrid:
    if _grid is None:
        raise ConfigError(
            "[deepspeed] the groups of sequence ranks do not exist yet: call "
            "initialize_sequence_parallel(), or UlyssesSPAttentionHF.register_with_transformers()"
        )
    return _grid


def _asks(name: str) -> Callable[[], Any]:
    return lambda: getattr(_made(), name)()


get_sequence_parallel_group = _asks("get_sequence_parallel_group")
get_sequence_parallel_world_size = _asks("get_sequence_parallel_world_size")
get_sequence_parallel_rank = _asks("get_sequence_parallel_rank")
get_data_parallel_group = _asks("get_data_parallel_group")
get_data_parallel_world_size = _asks("get_data_parallel_world_size")
get_data_parallel_rank = _asks("get_data_parallel_rank")
get_sequence_data_parallel_group = _asks("get_sequence_data_parallel_group")
get_sequence_data_parallel_world_size = _asks("get_sequence_data_parallel_world_size")
get_sequence_data_parallel_rank = _asks("get_sequence_data_parallel_rank")
# As in DeepSpeed, for code that does not know sequence ranks.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
