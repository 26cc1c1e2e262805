"""Functions that scripts import from deepspeed.runtime.utils."""

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

_NORMS = "the engine shards gradients; engine.get_global_grad_norm() returns their norm"


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Moves tensors, also in lists, tuples and dicts, to a device.

    If `criterion_func` is given, only tensors for which it returns True are moved.
    """
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
    """Logs the peak resident memory of rank 0's process, if `force` is set."""
    if force and int(os.environ.get("RANK", "0")) == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        logger.info(f"{message}: peak resident memory {peak:.2f} GB")


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Returns the text of a call."""
    inner = [repr(one) for one in args] + [f"{key}={one!r}" for key, one in kwargs.items()]
    return f"{base}({', '.join(inner)})"


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: int = 2, mpu: Any = None
) -> Any:
    """Raises ConfigError. Set gradient_clipping in the config instead."""
    raise ConfigError(
        "[deepspeed::clip_grad_norm_] not supported, since the engine shards gradients: set "
        "gradient_clipping in the config"
    )


get_global_norm = _missing_name.function("runtime.utils.get_global_norm", _NORMS)
get_grad_norm = _missing_name.function("runtime.utils.get_grad_norm", _NORMS)
get_global_norm_of_tensors = _missing_name.function(
    "runtime.utils.get_global_norm_of_tensors", _NORMS
)
get_weight_norm = _missing_name.function("runtime.utils.get_weight_norm", "use torch.linalg")
CheckOverflow = _missing_name.cls("runtime.utils.CheckOverflow", _NORMS)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Returns the bounds of equal parts. The remainder goes to the first parts, one item each."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


class DummyOptim:
    """A placeholder for a missing optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def empty_cache() -> None:
    """Does nothing: the engine returns memory to torch by itself."""
