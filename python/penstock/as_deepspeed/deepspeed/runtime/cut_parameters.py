"""Parameters that the modules of a script have cut over the tensor ranks of its mpu."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from penstock import ConfigError

from ..accelerator.real_accelerator import get_accelerator
from ..comm.comm import _of_ranks, get_rank, get_world_size
from ..utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from .config import as_dict

_STYLES = ("own_rows", "own_columns")  # indexed by the dim that is cut


def tensor_ranks_of(mpu: Any) -> int:
    """Returns the number of tensor ranks of an mpu.

    Raises ConfigError if they are not neighbouring ranks, which the engine needs.
    """
    if hasattr(mpu, "initialize_sequence_parallel"):
        return 1  # its model ranks are another name for its sequence ranks
    size = bwc_tensor_model_parallel_world_size(mpu)
    group = bwc_tensor_model_parallel_group(mpu) if size > 1 else None
    if size == 1:
        return 1
    if group is None:
        raise ConfigError(
            f"[deepspeed::initialize] the mpu has {size} tensor ranks, but it lacks the method "
            f"get_model_parallel_group(): add it"
        )
    of_stage = get_world_size() // bwc_pipeline_parallel_world_size(mpu)
    first, stage = get_rank() // size * size, get_rank() // of_stage * of_stage
    data = range(stage + get_rank() % size, stage + of_stage, size)
    places = {
        "get_model_parallel_group": (group, [*range(first, first + size)]),
        "get_data_parallel_group": (mpu.get_data_parallel_group(), [*data]),
    }
    for name, (own, expected) in places.items():
        if dist.get_process_group_ranks(own) != expected:
            raise ConfigError(
                f"[deepspeed::initialize] the mpu's {name}() has ranks "
                f"{dist.get_process_group_ranks(own)} on rank {get_rank()}; allowed: {expected}. "
                f"Tensor ranks must be neighbours, and all other ranks must be data ranks. For "
                f"stages, use a PipelineModule"
            )
    return size


def own_settings(mpu: Any, config: Any) -> dict[str, Any] | None:
    """Returns Penstock's settings for the tensor ranks of an mpu; None if it has no tensor ranks.

    Raises ConfigError if the config also sets tensor ranks or rules, or on an accelerator.
    """
    size = tensor_ranks_of(mpu)
    if size == 1:
        return None
    device = get_accelerator().device_name()
    if device != "cpu":
        raise ConfigError(
            f"[deepspeed::initialize] the mpu or topology has {size} tensor ranks, which cannot "
            f"train on a device yet, but this machine has {device!r}. Set DS_ACCELERATOR=cpu to "
            f'train on the CPU, or cut the layers by "tensor_parallel"'
        )
    given = as_dict(config)
    parallel = (given.get("penstock") or {}).get("parallel") or {}
    if "tensor_parallel" in given or "rules" in parallel:
        raise ConfigError(
            "[deepspeed::initialize] the mpu or topology has tensor ranks, so the model must cut "
            'its own layers: remove "tensor_parallel" and "penstock.parallel.rules"'
        )
    return {"mesh": {"tensor": size}}


class CutParameters:
    """A model's parameters that the script has cut: each tensor rank has built only its part.

    As in DeepSpeed, `param.model_parallel` or `param.tensor_model_parallel` marks them.
    `param.partition_dim` is the dim that is cut (default: 0). `param.partition_stride` is the
    number of equal blocks in this dim, each of which is cut.

    Args:
        model: a model with this rank's parts.
        group: the process group of the tensor ranks.

    Attributes:
        rules: Penstock's rule for each parameter.

    Raises:
        ConfigError: a parameter or a buffer without the mark differs between tensor ranks, or
            parts have different shapes.
    """

    def __init__(self, model: torch.nn.Module, group: Any) -> None:
        self._group, self._count = group, dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._cut: dict[str, tuple[torch.nn.Parameter, int, int]] = {}
        for name, param in model.named_parameters():
            if getattr(param, "model_parallel", False) or getattr(
                param, "tensor_model_parallel", False
            ):
                self._cut[name] = (param, *_place(name, param))
        self._check(model)
        self.rules = {
            name: _STYLES[dim] + (f":{stride}" if stride > 1 else "")
            for name, (_, dim, stride) in self._cut.items()
        } or {"*": "whole"}

    def _check(self, model: torch.nn.Module) -> None:
        own: dict[str, Any] = {}
        for name, one in [*model.named_parameters(), *model.named_buffers()]:
            if one.is_meta or one.untyped_storage().nbytes() < one.nbytes:
                raise ConfigError(
                    f'[deepspeed::initialize] "{name}" has no values. A model that cuts its own '
                    f"layers (mpu) must be built without zero.Init and without meta tensors"
                )
            told = self._cut[name][1:] if name in self._cut else _hash(one)
            own[name] = (tuple(one.shape), told)
        all_of = _of_ranks(own, self._group)
        for name in dict.fromkeys(name for one in all_of for name in one):  # so all ranks raise
            if any(one.get(name) != all_of[0].get(name) for one in all_of):
                raise ConfigError(
                    f'[deepspeed::initialize] "{name}" differs between tensor ranks. If each rank '
                    f"has a part of it, set param.model_parallel = True and param.partition_dim, "
                    f"and give all ranks parts of the same shape. Otherwise, give them the same "
                    f"values; a buffer that must differ must be a plain attribute instead"
                )

    def join(self) -> None:
        """Gives the parameters their full values. All tensor ranks call it."""
        for param, dim, stride in self._cut.values():
            own = param.detach().contiguous()
            parts = [torch.empty_like(own) for _ in range(self._count)]
            flat = [one.view(-1).view(torch.uint8) for one in parts]
            dist.all_gather(flat, own.view(-1).view(torch.uint8), group=self._group)
            blocks = [torch.unflatten(part, dim, (stride, -1)) for part in parts]
            param.data = torch.cat(blocks, dim + 1).flatten(dim, dim + 1)

    def give_back(self) -> None:
        """Cuts the parameters again: each has only this rank's part."""
        for param, dim, stride in self._cut.values():
            blocks = torch.unflatten(param.data, dim, (stride, self._count, -1))
            param.data = blocks.select(dim + 1, self._rank).flatten(dim, dim + 1).clone()


def _place(name: str, param: torch.nn.Parameter) -> tuple[int, int]:
    """Returns the dim that is cut and the number of blocks."""
    dim = int(getattr(param, "partition_dim", 0))
    stride = int(getattr(param, "partition_stride", 1))
    dim = 0 if dim < 0 else dim  # Megatron's default
    if dim >= min(len(_STYLES), param.dim()) or stride < 1 or param.shape[dim] % stride:
        raise ConfigError(
            f'[deepspeed::initialize] "{name}" of shape {list(param.shape)} has partition_dim '
            f"{dim} and partition_stride {stride}; allowed: dim 0 or 1, and a stride that divides "
            f"the size of this dim"
        )
    return dim, stride


def _hash(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()
