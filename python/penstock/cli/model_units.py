"""Finds the units of a module as the engine does, for `penstock plan --generate`."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torch import nn

from penstock.cli.model_spec import UnitSize, nearest
from penstock.front import module_tree

_LISTS = ("ModuleList", "ModuleDict", "Sequential")


def unit_sizes(model: nn.Module, names: Sequence[str], layer_bytes: int) -> list[UnitSize]:
    """Returns the sizes of the units: the root, then the others in model order.

    Follows find_units() of src/engine/model/units.h, but counts a model without repeated blocks as
    one unit, whatever its size.

    Args:
        names: class names of blocks (`units.modules`); empty: the repeated blocks.
        layer_bytes: size from which a layer outside the blocks is a unit (`units.layer_bytes`).

    Raises:
        ValueError: if the model has no module of one of these classes.
    """
    blocks = _blocks(model, names)
    _check_names(model, names, blocks)
    starts = {id(block) for block in blocks}
    if blocks:
        starts |= {id(layer) for layer in _large_layers(model, blocks, layer_bytes)}
    unit_at, owner = {"": 0}, dict[nn.Parameter, int]()
    is_block = [False]
    for name, module in module_tree.modules_of(model):
        unit = unit_at[name.rpartition(".")[0]]
        if id(module) in starts:
            unit = len(is_block)
            is_block.append(module in blocks)
        unit_at[name] = unit
        for param in _own(module):  # parameters that several units use belong to the root
            owner[param] = unit if owner.get(param, unit) == unit else 0
    numel, matrices = [0] * len(is_block), [0] * len(is_block)
    for param, unit in owner.items():
        numel[unit] += param.numel()
        matrices[unit] += param.numel() if is_block[unit] and param.dim() >= 2 else 0
    sizes = [UnitSize(*pair) for pair in zip(numel, matrices, strict=True)]
    return [sizes[0], *(size for size in sizes[1:] if size.numel > 0)]


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def _own(module: nn.Module) -> set[nn.Parameter]:
    return {param for param in module._parameters.values() if param is not None}


def _check_names(model: nn.Module, names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
    found = {_kind(block) for block in blocks}
    kinds = sorted({_kind(module) for _, module in module_tree.modules_of(model)})
    for name in names:
        if name not in found:
            raise ValueError(
                f'[plan] units.modules: no module below the root has the class "{name}": '
                f"{nearest(name, kinds)}"
            )


def _is_block(module: nn.Module) -> bool:
    has_params = next(module_tree.params_of(module), None) is not None
    return has_params and bool(_children(module)) and _kind(module) not in _LISTS[:2]


def _blocks(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Returns the outermost modules of these classes, or without classes those that repeat."""
    found = []
    kinds = collections.Counter(_kind(child) for child in _children(module) if _is_block(child))
    for child in _children(module):
        wanted = _kind(child) in names
        if not names and _is_block(child) and kinds[_kind(child)] >= 2:
            wanted = _kind(module) in _LISTS or not _has_blocks(child)
        found += [child] if wanted else _blocks(child, names)
    return found


def _has_blocks(module: nn.Module) -> bool:
    """Whether a list in the module repeats modules that have grandchildren. Then the module is a
    stack of blocks, such as an encoder."""
    kinds = collections.Counter[str]()
    for child in _children(module):
        if _has_blocks(child):
            return True
        deep = any(_children(part) for part in _children(child))
        if deep and _kind(module) in _LISTS and _is_block(child):
            kinds[_kind(child)] += 1
    return any(count >= 2 for count in kinds.values())


def _large_layers(
    model: nn.Module, blocks: Sequence[nn.Module], layer_bytes: int
) -> list[nn.Module]:
    """Returns the layers outside the blocks with so many bytes of parameters of their own."""
    modules = [module for _, module in module_tree.modules_of(model)]
    users = collections.Counter(param for module in modules for param in _own(module))
    inside = {id(part) for block in blocks for _, part in module_tree.modules_of(block)}
    return [
        module
        for module in modules
        if module is not model
        and id(module) not in inside
        and not _children(module)
        and sum(p.nbytes for p in _own(module) if users[p] == 1) >= layer_bytes
    ]
