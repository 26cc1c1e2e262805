"""Marks for modules to gather as a whole. They have no effect, since the engine gathers blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: torch.nn.Parameter) -> bool:
    return hasattr(model, "ds_z3_leaf_module")


def set_z3_leaf_module(model: torch.nn.Module, flag: bool = True) -> None:
    model._z3_leaf = flag  # type: ignore[assignment]


def _matches(module: torch.nn.Module, classes: Iterable[Any]) -> bool:
    return any(
        one in (type(module).__name__, f"{type(module).__module__}.{type(module).__name__}")
        if isinstance(one, str)
        else type(module) is one
        for one in classes
    )


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules of these classes (or class names) and returns them."""
    classes = list(leaf_module_classes)
    return _mark(
        [one for one in model.modules() if _matches(one, classes)], classes, raise_if_not_found
    )


def _mark(found: list[torch.nn.Module], wanted: Any, raises: bool) -> list[torch.nn.Module]:
    if not found and raises:
        raise ValueError(f"[deepspeed] the model has no module that matches {wanted}")
    for one in found:
        set_z3_leaf_module(one)
    return found


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks the modules with these names. Returns them and the names without a module."""
    named, names = dict(model.named_modules()), list(module_names)
    found = [named[one] for one in names if one in named]
    return _mark(found, names, raise_if_not_found), [one for one in names if one not in named]


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks modules whose names have these suffixes. Returns them and the unmatched suffixes."""
    ends = list(module_name_suffixes)
    found = [one for name, one in model.named_modules() if name.endswith(tuple(ends))]
    missing = [e for e in ends if not any(n.endswith(e) for n, _ in model.named_modules())]
    return _mark(found, ends, raise_if_not_found), missing


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Unmarks the modules of these classes and returns them."""
    found = [one for one in model.modules() if _matches(one, list(leaf_module_classes))]
    for one in found:
        set_z3_leaf_module(one, False)
    return found


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [one for one in model.modules() if z3_leaf_module(one)]
