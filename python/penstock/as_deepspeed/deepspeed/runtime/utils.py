"""Small things that scripts import from here."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from penstock import ConfigError

from .. import _missing_name
from ..utils.logging import logger

_NORMS = "gradients are sharded in the engine: engine.get_global_grad_norm() is their norm"


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Tensors in lists, tuples and dicts, on a device; where `criterion_func` (of a tensor) says
    so."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, list):
        return [move_to_device(one, device, criterion_func) for one in item]
    if isinstance(item, tuple):
        return tuple(move_to_device(one, device, criterion_func) for one in item)
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the process's memory, on rank 0, where it is forced."""
    if force and int(os.environ.get("RANK", "0")) == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        logger.info(f"{message}: peak resident memory {peak:.2f} GB")


def set_random_seed(seed: int) -> None:
    """Of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call."""
    inner = [repr(one) for one in args] + [f"{key}={one!r}" for key, one in kwargs.items()]
    return f"{base}({', '.join(inner)})"


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: int = 2, mpu: Any = None
) -> Any:
    """Raises ConfigError: a sharded gradient is clipped by the engine (gradient_clipping)."""
    raise ConfigError(
        "[deepspeed::clip_grad_norm_] gradients are sharded in the engine: set gradient_clipping"
    )


get_global_norm = _missing_name.function("runtime.utils.get_global_norm", _NORMS)
get_grad_norm = _missing_name.function("runtime.utils.get_grad_norm", _NORMS)
get_global_norm_of_tensors = _missing_name.function(
    "runtime.utils.get_global_norm_of_tensors", _NORMS
)
get_weight_norm = _missing_name.function("runtime.utils.get_weight_norm", "use torch.linalg")
CheckOverflow = _missing_name.cls("runtime.utils.CheckOverflow", _NORMS)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of equal parts, the first ones longer by one where they must be."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


class DummyOptim:
    """In the place of an optimizer that there is none of."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def empty_cache() -> None:
    """Nothing: memory comes from torch and goes back to it."""
