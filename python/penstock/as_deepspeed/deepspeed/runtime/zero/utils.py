"""Generation with a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .partition_parameters import GatheredParameters
from .partition_parameters import is_zero_param as is_zero_param


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """Yields the module with whole parameters, inside the context."""
    module = model.module if hasattr(model, "module") else model
    with GatheredParameters(list(module.parameters())):
        yield module
