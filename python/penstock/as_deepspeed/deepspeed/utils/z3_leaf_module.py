"""Marks of modules that DeepSpeed gathers as a whole. Here they have no effect."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .logging import logger


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: torch.nn.Parameter) -> bool:
    """Whether the parameter was in a marked module when its engine was created."""
    return hasattr(model, "ds_z3_leaf_module")


class _Callable(types.ModuleType):
    """The type of this module. `deepspeed.utils` exports the module under its function's name."""

    def __call__(self, model: torch.nn.Module) -> bool:
        return z3_leaf_module(model)


sys.modules[__name__].__class__ = _Callable


def set_z3_leaf_module(model: torch.nn.Module, flag: bool = True) -> None:
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [one for one in model.modules() if z3_leaf_module(one)]


def _is_of(module: torch.nn.Module, one: Any) -> bool:
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return one in names if isinstance(one, str) else isinstance(module, one)


def _mark_classes(
    model: torch.nn.Module, classes: Iterable[Any], flag: bool, raises: bool
) -> list[torch.nn.Module]:
    wanted, found = list(classes), []

    def look(module: torch.nn.Module) -> None:
        if any(_is_of(module, one) for one in wanted):
            set_z3_leaf_module(module, flag)
            found.append(module)

    model.apply(look)
    if not found and raises:
        raise ValueError(f"[deepspeed] the model has no module of the classes {wanted}")
    return found


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules of these classes, or of classes with these names, and returns them.

    Raises ValueError if there are none.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Unmarks the modules of these classes and returns them. Raises ValueError if none exist."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def _mark_names(
    model: torch.nn.Module,
    wanted: Iterable[str],
    flag: bool,
    raises: bool,
    fits: Callable[[str, str], bool],
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks modules. Returns the modules, and the names that match none."""
    found: dict[torch.nn.Module, None] = {}
    missing = []
    for one in wanted:
        own = [module for name, module in model.named_modules() if fits(name, one)]
        found.update(dict.fromkeys(own))
        missing += [] if own else [one]
    for module in found:
        set_z3_leaf_module(module, flag)
    if missing and raises:
        raise ValueError(f"[deepspeed] the model has no module that matches {missing}")
    return list(found), missing


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks the modules with these names. Returns the modules, and the names that match none.

    Raises ValueError for such names, unless `raise_if_not_found` is False.
    """
    return _mark_names(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks modules whose names have these suffixes. Returns the modules, and unmatched suffixes.

    Raises ValueError for such suffixes, unless `raise_if_not_found` is False.
    """
    return _mark_names(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def apply_zero_leaf_module_config(model: torch.nn.Module, leaf_cfg: Any) -> list[torch.nn.Module]:
    """Marks the modules that a config's section leaf_module selects, and returns them.

    A name that matches no module is logged.
    """
    if leaf_cfg is None:
        return []
    found = dict.fromkeys(_mark_classes(model, leaf_cfg.classes, True, False))
    for wanted, mark in (
        (leaf_cfg.names, set_z3_leaf_modules_by_name),
        (leaf_cfg.name_suffixes, set_z3_leaf_modules_by_suffix),
    ):
        modules, missing = mark(model, wanted, raise_if_not_found=False)
        found.update(dict.fromkeys(modules))
        if missing:
            logger.warning(f"zero_optimization.leaf_module: no module matches {missing}")
    return list(found)
