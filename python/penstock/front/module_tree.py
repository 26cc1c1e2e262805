"""Describes an nn.Module to the engine: modules, parameters, buffers."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front import buffer_dtypes
from penstock.parallel.lazy_logits import with_history


def model_tree(
    model: torch.nn.Module,
    group_of: Mapping[torch.Tensor, int],
    init: Any = None,
    device: torch.device | None = None,
) -> Any:
    """Describes the model for the C++ engine: modules in pre-order, each parameter once.

    Args:
        group_of: the optimizer's group of each parameter.
        init: the store of parameters built under `penstock.init()`, or None.
        device: where the engine moves the model, or None if the model stays where it is.
    """
    params: dict[torch.Tensor, int] = {}
    infos: list[Any] = []
    for name, param in params_of(model):
        params[param] = len(infos)
        infos.append(_penstock.ParamInfo(name, param, group_of.get(param, 0)))
    indices: dict[str, int] = {}
    modules: list[Any] = []
    for name, module in modules_of(model):
        parent = name.rpartition(".")[0]
        indices[name] = len(modules)
        own = sorted({params[p] for p in module._parameters.values() if p is not None})
        weight: Any = module._parameters["weight"] if has_rows(module) else None
        rows = -1 if weight is None else params[weight]
        kind = type(module).__name__
        above = indices[parent] if name else -1
        keeps = any(True for _ in saved_buffers(module))
        modules.append(_penstock.ModuleInfo(name, kind, above, own, rows, keeps))
    return _penstock.ModelTree(modules, infos, _buffer_infos(model, params), init, device)


def _buffer_infos(model: torch.nn.Module, params: Mapping[torch.Tensor, int]) -> list[Any]:
    """Describes each buffer once, with the parameter whose dtype it takes."""
    follows = buffer_dtypes.followed(module for _, module in modules_of(model))
    infos: dict[int, Any] = {}
    for name, value in named_buffers_of(model):
        param = follows.get(id(value))
        index = -1 if param is None else params[param]
        infos.setdefault(id(value), _penstock.BufferInfo(name, value, index))
    return list(infos.values())


# [Note: Overridden walks] A model may override `parameters`, `named_modules` and similar methods
# to hide or rename weights. The engine must still see every parameter once, under the name that its
# checkpoints have. So it walks the modules' own dicts.


def modules_of(
    model: torch.nn.Module, repeats: bool = False
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the modules by name in pre-order: each once or, with `repeats`, under every name.

    See [Note: Overridden walks].
    """
    yield from _modules_below("", model, None if repeats else set())


def _modules_below(
    name: str, module: torch.nn.Module, seen: set[int] | None
) -> Iterator[tuple[str, torch.nn.Module]]:
    if seen is not None:
        if id(module) in seen:
            return
        seen.add(id(module))
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _modules_below(f"{name}.{key}" if name else key, child, seen)


def params_of(
    model: torch.nn.Module, repeats: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters by name: each once or, with `repeats`, under every name."""
    seen: set[int] = set()
    for path, module in modules_of(model, repeats):
        for key, param in module._parameters.items():
            if param is None or (id(param) in seen and not repeats):
                continue
            seen.add(id(param))
            yield f"{path}.{key}" if path else key, param


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device of the model's parameters; the CPU if there are none."""
    return next((param.device for _, param in params_of(model)), torch.device("cpu"))


def named_buffers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers under every name, persistent ones and others."""
    for path, module in modules_of(model):
        for key, value in module._buffers.items():
            if value is not None:
                yield f"{path}.{key}" if path else key, value


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the buffers, each once."""
    return list({id(value): value for _, value in named_buffers_of(model)}.values())


def submodule(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Returns the module of that name. Raises KeyError if there is none."""
    module: Any = model
    for key in name.split(".") if name else ():
        module = module._modules[key]
    return module  # type: ignore[no-any-return]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the module's own persistent buffers by name."""
    for name, value in module._buffers.items():
        if value is not None and name not in module._non_persistent_buffers_set:
            yield name, value


def has_rows(module: torch.nn.Module) -> bool:
    """Whether the module is a plain torch Linear or Embedding, so that its weight can be tiled."""
    plain = type(module) in (torch.nn.Linear, torch.nn.Embedding)
    own = "forward" not in vars(module) and not is_compiled_in_place(module)
    renorms = getattr(module, "max_norm", None) is not None
    return plain and own and not renorms and "weight" in module._parameters


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called. Then its hooks are part of the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def refuse_compiled(
    model: torch.nn.Module, config: Any, recomputed: bool, moves_caches: bool
) -> None:
    """Raises ConfigError if the whole model is compiled, because the engine acts in its blocks."""
    whole = type(model).__name__ == "OptimizedModule"  # made by torch.compile()
    if not whole and not is_compiled_in_place(model):
        return
    why = f'strategy "{config.strategy}" moves its parameters'
    if recomputed:
        why = '"activations.checkpoint" recomputes its blocks'
    elif moves_caches:
        why = '"offload.cache" moves the tokens of its blocks'
    raise ConfigError(
        f"[front::initialize] the whole model is compiled, but {why}. Compile its blocks instead "
        f"(block.compile())"
    )


def place_of_hooks(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Returns the module that gets the hooks of the unit `name`.

    Compiled code does not run the hooks of layers inside it, so hooks go around the compiled
    module.
    """
    # The OptimizedModule of torch.compile() holds the module: hooks go around both.
    outer = submodule(model, name.removesuffix("._orig_mod"))
    if any(child is not None for child in submodule(model, name)._modules.values()):
        return outer
    parts = name.split(".")
    for depth in range(1, len(parts)):
        module = submodule(model, ".".join(parts[:depth]))
        if type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module):
            return module
    return outer


def parts_around(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns the modules that have parameters and are outside of the units, without the model."""
    inside = {id(module) for unit in units for _, module in modules_of(unit)}
    return [
        module
        for _, module in modules_of(model)
        if module is not model
        and id(module) not in inside
        and next(params_of(module), None) is not None
    ]


def names_of(model: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Returns every name of every parameter. A tied parameter has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in params_of(model, repeats=True):
        names.setdefault(param, []).append(name)
    return names


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists, mappings and objects with fields.

    Visits each object once.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            yield with_history(one)
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.extend(reversed(_items_of(one)))


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None or isinstance(value, (str, bytes, int, float, type, torch.nn.Module)):
        return []
    names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    items = [getattr(value, name) for name in names if hasattr(value, name)]
    return items + list(getattr(value, "__dict__", {}).values())


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_OPAQUE = (torch.Tensor, torch.nn.Module, type, str, bytes, int, float, complex)


class State:
    """A shallow copy of an object's state: its fields, and its items if it is a plain list, dict,
    set or deque."""

    def __init__(self, one: Any) -> None:
        self._items = copy.copy(one) if type(one) in CONTAINERS else None
        self._fields = dict(vars(one)) if hasattr(one, "__dict__") else {}
        slots = [name for kind in type(one).__mro__ for name in _slots_of(kind)]
        self._slots = {n: getattr(one, n) for n in slots if n != "__dict__" and hasattr(one, n)}

    def is_of(self, one: Any) -> bool:
        """Whether `one` holds the same objects under the same names."""
        now = State(one)
        return _same(list(self.values()), list(now.values())) and _same(self._names(), now._names())

    def values(self) -> Iterator[Any]:
        if self._items is not None:
            yield from self._items.values() if isinstance(self._items, dict) else self._items
        yield from self._fields.values()
        yield from self._slots.values()

    def put_in(self, one: Any) -> None:
        """Sets the state of `one` to this state."""
        if self._items is not None:
            one.clear()
            (one.extend if isinstance(one, (list, deque)) else one.update)(self._items)
        if hasattr(one, "__dict__"):
            vars(one).clear()
            vars(one).update(self._fields)
        for name, value in self._slots.items():
            object.__setattr__(one, name, value)

    def _names(self) -> list[Any]:
        keys = list(self._items) if isinstance(self._items, dict) else []
        return [*keys, *self._fields, *self._slots]


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def objects_in(value: Any) -> list[Any]:
    """Returns the containers and objects with fields in nested arguments, each once.

    Leaves out tensors, modules, functions, classes and numbers, and the contents of these.
    """
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, _OPAQUE) or callable(one) or id(one) in found:
            continue
        if isinstance(one, tuple):
            waiting.extend(one)
        elif type(one) in CONTAINERS or hasattr(one, "__dict__") or _slots_of(type(one)):
            found[id(one)] = one
            waiting.extend(State(one).values())
    return list(found.values())


class Place:
    """Marks the place of a tensor that take_out() removed."""

    def __init__(self, index: int) -> None:
        self.index = index


def _rebuilt(value: Any, change: Any) -> Any:
    """Returns a copy of `value` with `change` applied to its tensors. Containers are copied."""
    if isinstance(value, (torch.Tensor, Place)):
        return change(value)
    if isinstance(value, tuple):
        items = [_rebuilt(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # Skips the class's own __new__, which may read the tensors.
        rebuilt: Any = tuple.__new__(type(value), items)
        getattr(rebuilt, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return rebuilt
    other: Any
    if isinstance(value, list):
        other = copy.copy(value)
        other[:] = [_rebuilt(item, change) for item in value]
        return other
    if isinstance(value, dict):
        other = copy.copy(value)
        other.update({key: _rebuilt(item, change) for key, item in value.items()})
        return other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        fields = {name: _rebuilt(getattr(value, name), change) for name in names}
        if all(fields[name] is getattr(value, name) for name in names):
            return value
        other = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(other, name, item)  # works on frozen dataclasses
        return other
    return value


def filled(value: Any, change: Any) -> Any:
    """Applies `change` to the tensors in `value`. Changes lists, dicts and dataclasses in place,
    and builds new tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [filled(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        made: Any = tuple.__new__(type(value), items)
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return made
    if isinstance(value, (list, dict)):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            new = filled(item, change)
            if new is not item:
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            new = filled(item, change)
            if new is not item:
                object.__setattr__(value, field.name, new)  # works on frozen dataclasses
    return value


def take_out(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Returns the tensors in nested lists, tuples, dicts and dataclasses, each once, and a copy of
    `value` with a Place for each tensor.

    Other objects stay unchanged and keep their tensors.
    """
    places: dict[int, Place] = {}
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> Place:
        if id(tensor) not in places:
            places[id(tensor)] = Place(len(tensors))
            tensors.append(tensor)
        return places[id(tensor)]

    return tensors, _rebuilt(value, take)


def put_in(tensors: Sequence[torch.Tensor], left: Any) -> Any:
    """Returns the value that `take_out` split, with these tensors in the places."""
    return _rebuilt(left, lambda place: tensors[place.index])
