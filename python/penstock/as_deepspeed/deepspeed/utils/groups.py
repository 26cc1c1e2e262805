"""Groups of ranks: all are data ranks, unless an engine with a pipeline or tensor ranks is open."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import _absent
from ..comm.comm import get_rank, get_world_size

mpu: Any = None  # of the last open engine that has a pipeline or tensor ranks


def get_data_parallel_group() -> Any:
    if mpu is not None:
        return mpu.get_data_parallel_group()
    return dist.group.WORLD if dist.is_initialized() else None


def get_data_parallel_world_size() -> int:
    return get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())


def get_data_parallel_rank() -> int:
    return get_rank() if mpu is None else int(mpu.get_data_parallel_rank())


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    return 1 if mpu is None else int(mpu.get_model_parallel_world_size())


def get_model_parallel_rank() -> int:
    return 0 if mpu is None else int(mpu.get_model_parallel_rank())


def get_model_parallel_group() -> Any:
    """Raises ConfigError where no engine with tensor ranks is open."""
    if mpu is None:
        _without_tensor_ranks()
    return mpu.get_model_parallel_group()


_get_broadcast_src_rank = _zero
_get_model_parallel_world_size = get_tensor_model_parallel_world_size = (
    get_model_parallel_world_size
)
_get_model_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
_get_model_parallel_group = get_tensor_model_parallel_group = get_model_parallel_group
_get_sequence_parallel_world_size = get_sequence_parallel_world_size = _one
_get_sequence_parallel_rank = get_sequence_parallel_rank = _zero
_get_expert_parallel_world_size, _get_expert_parallel_rank = _one, _zero
_get_sequence_parallel_group = _absent.function(
    "groups._get_sequence_parallel_group", _absent.SEQUENCE
)
_get_expert_parallel_group = _absent.function(
    "groups._get_expert_parallel_group", "expert parallelism is not built yet"
)
_TENSOR = 'initialize() makes them, with "tensor_parallel": {"autotp_size": N} in the config'
_without_tensor_ranks = _absent.function("a group of tensor ranks without an engine's", _TENSOR)
initialize_model_parallel = _absent.function("groups.initialize_model_parallel", _TENSOR)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for a group of one."""
    if ep_size > 1:
        _get_expert_parallel_group()
