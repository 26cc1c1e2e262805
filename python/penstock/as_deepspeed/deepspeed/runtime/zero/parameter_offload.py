"""What sharded parameters hang on, for code that takes DeepSpeed's hooks off a model."""

from __future__ import annotations

from typing import Any

import torch


class _Coordinator:
    """No trace is kept in Python: nothing to invalidate."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        pass

    def reset_step(self) -> None:
        pass


class DeepSpeedZeRoOffload:
    """A front without hooks of its own: parameters come and go in C++, generate() included."""

    def __init__(self, module: torch.nn.Module, **_: Any) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def get_param_coordinator(self, *_: Any, **__: Any) -> _Coordinator:
        return self.param_coordinator

    def _register_deepspeed_module(
        self, module: torch.nn.Module, count: list[int] | None = None
    ) -> None:
        """Nothing is to be put back."""

    setup_zero_stage3_hooks = empty_partition_cache = lambda self: None
