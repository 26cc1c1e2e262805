"""Process groups. All ranks are data ranks, unless an open engine has a pipeline, tensor ranks or
sequence ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from penstock import ConfigError

from .. import _missing_name
from ..comm.comm import get_rank, get_world_size

mpu: Any = None  # grid of the last open engine with a pipeline, tensor or sequence ranks
_opened: list[Any] = []  # the grids of all open engines that have one


def _open(engine: Any, grid: Any) -> Callable[[], Any]:
    """Registers the grid of `engine`. Returns a function that removes it.

    The grid is also removed when the engine is deleted.
    """
    global mpu  # noqa: PLW0603 - DeepSpeed's mpu is a global, too
    _opened.append(grid)
    mpu = grid
    close = weakref.finalize(engine, _close, grid)
    close.atexit = False
    return close


def _close(grid: Any) -> None:
    """Removes a grid."""
    global mpu  # noqa: PLW0603
    place = next((i for i, one in enumerate(_opened) if one is grid), None)
    if place is not None:
        del _opened[place]
    mpu = _opened[-1] if _opened else None


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def _asks(name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls the mpu's method `name`; `otherwise` if there is none."""
    return lambda: getattr(mpu, name, otherwise)()


def _of_tensor_ranks(name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    """The same, but an mpu with sequence ranks counts as none: its model ranks are these ranks."""
    return lambda: getattr(None if hasattr(mpu, _SEQUENCES) else mpu, name, otherwise)()


_SEQUENCES = "get_sequence_parallel_group"
_TENSOR = 'initialize() creates it, with "tensor_parallel": {"autotp_size": N} in the config'
_SEQUENCE = (
    'initialize() creates it, with "sequence_parallel_size" in the config, mesh_param or an mpu'
)
_without_tensor_ranks = _missing_name.function("a group of tensor ranks without an engine", _TENSOR)
_without_sequence_ranks = _missing_name.function(
    "a group of sequence ranks without an engine", _SEQUENCE
)
get_sequence_parallel_group = _asks(_SEQUENCES, _without_sequence_ranks)
get_sequence_parallel_world_size = _asks("get_sequence_parallel_world_size", _one)
get_sequence_parallel_rank = _asks("get_sequence_parallel_rank", _zero)
# Each data rank has its own samples.
get_data_parallel_group = _asks(
    "get_data_parallel_group", lambda: dist.group.WORLD if dist.is_initialized() else None
)
get_data_parallel_world_size = _asks(
    "get_data_parallel_world_size", lambda: get_world_size() // get_sequence_parallel_world_size()
)
get_data_parallel_rank = _asks(
    "get_data_parallel_rank", lambda: get_rank() // get_sequence_parallel_world_size()
)
_get_sequence_data_parallel_group = _asks(
    "get_sequence_data_parallel_group", get_data_parallel_group
)
_get_sequence_data_parallel_world_size = _asks(
    "get_sequence_data_parallel_world_size", get_data_parallel_world_size
)
_get_sequence_data_parallel_rank = _asks("get_sequence_data_parallel_rank", get_data_parallel_rank)
get_model_parallel_group = _of_tensor_ranks("get_model_parallel_group", _without_tensor_ranks)
get_model_parallel_world_size = _of_tensor_ranks("get_model_parallel_world_size", _one)
get_model_parallel_rank = _of_tensor_ranks("get_model_parallel_rank", _zero)


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the groups of expert ranks, and those of ranks with the same experts.

    Ranks are numbered by stage, then data rank, then tensor rank. Experts are divided among
    neighbouring data ranks, or, with use_data_before_expert_parallel_, among ranks far apart.
    """
    stage, left = divmod(world_size, pipeline_parallel_size_)
    data, more = divmod(stage, tensor_parallel_size_)
    replicas, rest = divmod(data, expert_parallel_size_)
    if left or more or rest:
        raise ConfigError(
            f"[deepspeed::_get_expert_parallel_ranks] {world_size} ranks cannot be divided evenly "
            f"into {pipeline_parallel_size_} stages, {tensor_parallel_size_} tensor ranks and "
            f"{expert_parallel_size_} expert ranks"
        )
    experts, same = [], []
    for first in range(0, world_size, stage):
        for tensor in range(tensor_parallel_size_):
            ranks = range(first + tensor, first + stage, tensor_parallel_size_)
            near = [[*ranks[i : i + expert_parallel_size_]]
                    for i in range(0, data, expert_parallel_size_)]  # fmt: skip
            apart = [[*ranks[i::replicas]] for i in range(replicas)]
            if use_data_before_expert_parallel_:
                experts += apart
                same += [[*ranks[i : i + replicas]] for i in range(0, data, replicas)]
            else:
                experts += near
                same += [[*ranks[i::expert_parallel_size_]] for i in range(expert_parallel_size_)]
    return experts, same


_get_broadcast_src_rank = _zero
_get_model_parallel_world_size = get_tensor_model_parallel_world_size = (
    get_model_parallel_world_size
)
_get_model_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
_get_model_parallel_group = get_tensor_model_parallel_group = get_model_parallel_group
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_sequence_parallel_group = get_sequence_parallel_group
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
_get_expert_parallel_world_size, _get_expert_parallel_rank = _one, _zero
_get_expert_parallel_group = _missing_name.function(
    "groups._get_expert_parallel_group", "expert parallelism is not built yet"
)
initialize_model_parallel = _missing_name.function("groups.initialize_model_parallel", _TENSOR)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for ep_size 1. Raises ConfigError for a larger one."""
    if ep_size > 1:
        _get_expert_parallel_group()
