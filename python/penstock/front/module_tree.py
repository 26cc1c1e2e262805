"""Describes an nn.Module to the engine: modules, parameters, buffers."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock._native import _penstock
from penstock.parallel.lazy_logits import with_history


def model_tree(
    model: torch.nn.Module, group_of: Mapping[torch.Tensor, int], init: Any = None
) -> Any:
    """The model as the C++ engine sees it: modules in pre-order, each parameter once.

    `init` is where parameters built under `penstock.init()` are.
    """
    params: dict[torch.Tensor, int] = {}
    infos: list[Any] = []
    for name, param in model.named_parameters():
        params[param] = len(infos)
        infos.append(_penstock.ParamInfo(name, param, group_of.get(param, 0)))
    indices: dict[str, int] = {}
    modules: list[Any] = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        indices[name] = len(modules)
        own = sorted({params[p] for p in module.parameters(recurse=False)})
        rows = params[module.weight] if has_rows(module) else -1
        kind = type(module).__name__
        above = indices[parent] if name else -1
        keeps = any(True for _ in saved_buffers(module))
        modules.append(_penstock.ModuleInfo(name, kind, above, own, rows, keeps))
    return _penstock.ModelTree(modules, infos, list(model.buffers()), init)


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own buffers that state_dict() has."""
    for name, value in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, value


class _Filled(OrderedDict[str, Any]):
    """Has full values where a module saves a parameter, so that hooks of modules find them."""

    def __init__(self, full: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._full = full
        self._metadata: OrderedDict[str, Any] = OrderedDict()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._full.get(id(value), value))


def filled_state_dict(
    model: torch.nn.Module,
    full: Mapping[int, torch.Tensor],
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """The model's state_dict() with these values, by id of the parameter; no memory of its own."""
    found = model.state_dict(destination=_Filled(full), keep_vars=True)
    ours = {id(value) for value in full.values()}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and id(value) not in ours:
            value = value.detach().clone()  # noqa: PLW2901 - a buffer, or what a hook made
            state[name] = value if device is None else value.to(device)
        else:
            state[name] = value
    state._metadata = getattr(found, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return state


def has_rows(module: torch.nn.Module) -> bool:
    """Whether the module is nothing but torch's Linear or Embedding: its weight can be tiled."""
    plain = type(module) in (torch.nn.Linear, torch.nn.Embedding)
    own = "forward" not in vars(module) and not is_compiled_in_place(module)
    renorms = getattr(module, "max_norm", None) is not None
    return plain and own and not renorms and "weight" in module._parameters


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called: its hooks are part of the compiled code then."""
    return getattr(module, "_compiled_call_impl", None) is not None


def place_of_hooks(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module whose begin and end are those of the unit `name`.

    A layer inside compiled code is there as long as that code runs, which sees no hooks.
    """
    # What torch.compile() returns holds the module: hooks go around both.
    outer = model.get_submodule(name.removesuffix("._orig_mod"))
    if next(model.get_submodule(name).children(), None) is not None:
        return outer
    parts = name.split(".")
    for depth in range(1, len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module):
            return module
    return outer


def parts_around(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules outside of the units that hold parameters, but for the model itself."""
    inside = {module for unit in units for module in unit.modules()}
    return [
        module
        for module in model.modules()
        if module is not model
        and module not in inside
        and next(module.parameters(), None) is not None
    ]


def names_of(model: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Every name of every parameter: tied parameters have several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and objects with fields, each object once."""
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


_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_OPAQUE = (torch.Tensor, torch.nn.Module, type, str, bytes, int, float, complex)


class State:
    """What an object holds: its fields, and its items where it is a list, dict, set or deque of
    Python's own. What these hold is shared."""

    def __init__(self, one: Any) -> None:
        self._items = copy.copy(one) if type(one) in _CONTAINERS else None
        self._fields = dict(vars(one)) if hasattr(one, "__dict__") else {}
        slots = [name for kind in type(one).__mro__ for name in _slots_of(kind)]
        self._slots = {n: getattr(one, n) for n in slots if n != "__dict__" and hasattr(one, n)}

    def is_of(self, one: Any) -> bool:
        """Whether `one` holds the very same."""
        now = State(one)
        return _same(list(self.values()), list(now.values())) and _same(self._names(), now._names())

    def values(self) -> Iterator[Any]:
        if self._items is not None:
            yield from self._items.values() if isinstance(self._items, dict) else self._items
        yield from self._fields.values()
        yield from self._slots.values()

    def put_in(self, one: Any) -> None:
        """Gives `one` this state."""
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
    """The containers and objects with fields in nested arguments, each once; neither tensors,
    modules, functions, classes and numbers nor what these hold."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, _OPAQUE) or callable(one) or id(one) in found:
            continue
        if isinstance(one, tuple):
            waiting.extend(one)
        elif type(one) in _CONTAINERS or hasattr(one, "__dict__") or _slots_of(type(one)):
            found[id(one)] = one
            waiting.extend(State(one).values())
    return list(found.values())


class Place:
    """Where a tensor was."""

    def __init__(self, index: int) -> None:
        self.index = index


def _rebuilt(value: Any, change: Any) -> Any:
    """`value` with `change` made to the tensors in it, in lists and dicts of its own."""
    if isinstance(value, (torch.Tensor, Place)):
        return change(value)
    if isinstance(value, tuple):
        items = [_rebuilt(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # Past its own __new__, which may look at the tensors.
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
            object.__setattr__(other, name, item)  # frozen ones, too
        return other
    return value


def filled(value: Any, change: Any) -> Any:
    """`value` with `change` made to the tensors in it: in the very same lists, dicts and
    dataclasses; tuples are made anew."""
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
                object.__setattr__(value, field.name, new)  # frozen ones, too
    return value


def take_out(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in nested lists, tuples, dicts and dataclasses, each once, and what is left.

    Other objects stay as they are, with the tensors they hold.
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
    """What `take_out` took apart, with these tensors."""
    return _rebuilt(left, lambda place: tensors[place.index])
