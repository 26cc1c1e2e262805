"""Registers the back end "penstock" with torch.distributed, without importing torch.

`import penstock` must be enough for `init_process_group("penstock")`. But it must not import torch,
because the import of torch takes longer than most commands. So the registration waits until
something imports torch.distributed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "penstock"
_TORCH = "torch.distributed.distributed_c10d"  # defines Backend


def _make(*args: Any) -> Any:
    """Makes the back end of one process group. The first call imports the back end's module."""
    return importlib.import_module("penstock.front.shm_group").make(*args)


def _register(distributed: ModuleType) -> None:
    backend = getattr(distributed, "Backend", None)  # None: this torch has no distributed
    if backend is not None and NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _make, devices=["cpu"])


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds, as Python does, the module that defines Backend, and registers after it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def arrange() -> None:
    """Registers now if torch.distributed is imported, else when it is imported."""
    if _TORCH in sys.modules:
        _register(sys.modules[_TORCH])
    else:
        sys.meta_path.insert(0, _AfterImport())
