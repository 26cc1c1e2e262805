"""Access to attributes of a module's parts by a path with dots."""

from __future__ import annotations

import functools
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Returns the attribute at a path, such as "model.layers.0"."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at a path."""
    owner, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, last, module)
