"""DeepSpeed's hook objects, for code that removes DeepSpeed's hooks from a model."""

from __future__ import annotations

from typing import Any

import torch


def _external_parameters(module: torch.nn.Module) -> tuple[()]:
    """Returns (): the engine itself finds parameters that a module reads from other modules."""
    return ()


torch.nn.Module.ds_external_parameters = _external_parameters  # type: ignore[attr-defined]


class _Coordinator:
    """The engine keeps no trace in Python, so there is nothing to invalidate."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        pass


class DeepSpeedZeRoOffload:
    """An object without hooks: C++ gathers and releases parameters, also in generate()."""

    def __init__(self, module: torch.nn.Module, **_: Any) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(
        self, module: torch.nn.Module, count: list[int] | None = None
    ) -> None:
        """Does nothing: there are no hooks to restore."""
