"""Creates the modules and names of DeepSpeed that this package does not define, from the table of
penstock.deepspeed_names. Constants have DeepSpeed's values; functions and classes raise if used."""

from __future__ import annotations

import builtins
import copy
import dis
import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from penstock import deepspeed_names

from . import _missing_name
from ._settings import Settings

HERE = pathlib.Path(__file__).parent
_PACKAGE = __name__.partition(".")[0]


def attributes(module: str, beside: Any = None) -> Callable[[str], Any]:
    """Returns the __getattr__ of a module. The module also has the names of `beside`."""
    return functools.partial(_look_up, module, beside)


def _look_up(module: str, beside: Any, name: str) -> Any:
    if beside is not None and hasattr(beside, name):
        return getattr(beside, name)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if not deepspeed_names.knows(module, name):
        here = {one for one in vars(sys.modules[module]) if not one.startswith("_")}
        text = deepspeed_names.no_such_name(module, name, here)
        raise ImportError(text) if _is_import(sys._getframe(1)) else AttributeError(text)
    made = _make(module, name)
    vars(sys.modules[module])[name] = made
    return made


def _is_import(frame: types.FrameType) -> bool:
    """Whether the lookup comes from `from module import name`, which hides an AttributeError."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


def _make(module: str, name: str) -> Any:
    if f"{module}.{name}" in deepspeed_names.table():
        return importlib.import_module(f"{module}.{name}")
    if deepspeed_names.elsewhere(module, name) is None and name in deepspeed_names.defined(module):
        return _defined(module, name)
    origin = deepspeed_names.source(module, name)
    assert origin is not None  # deepspeed_names.knows() has found it
    return getattr(importlib.import_module(origin[0]), origin[1])


def _defined(module: str, name: str) -> Any:
    line, full = deepspeed_names.table()[module], f"{module}.{name}"
    if name in line.get("values", ()):
        return copy.deepcopy(line["values"][name])
    if name in line.get("getters", ()):
        key, default = line["getters"][name]
        return lambda param_dict: param_dict.get(key, default)
    if name in line.get("enums", ()):
        return _enum(module, name, dict(line["enums"][name]))
    if name in line.get("errors", ()):
        base = getattr(builtins, line["errors"][name])
        return type(name, (base,), {"__module__": module})
    if name in line.get("settings", ()):
        return _settings(module, name, line["settings"][name])
    instead = deepspeed_names.instead(full)
    if name in line.get("defs", ()):
        return _missing_name.function(full, instead)
    if name in line.get("classes", ()):
        return _missing_name.cls(full, instead)
    return _missing_name.Thing(full, instead)


def _enum(module: str, name: str, members: dict[str, Any]) -> Any:
    base = members.pop("")
    if base == "object":
        return type(name, (), members)
    members["__module__"] = module
    kinds = {"int": (int, enum.Enum), "str": (str, enum.Enum), "": (enum.Enum,)}
    return types.new_class(name, kinds[base], {}, lambda body: body.update(members))


def _settings(module: str, name: str, keys: dict[str, Any]) -> type:
    return type(name, (Settings,), {"_KEYS": keys, "__module__": module})


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file of this package. Names that the file does not define come from the table."""

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).setdefault("__getattr__", attributes(module.__name__))
        super().exec_module(module)


class _Generated(importlib.abc.Loader):
    """Makes a module whose names all come from the table."""

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Names of DeepSpeed, from penstock.deepspeed_names."
        vars(module)["__getattr__"] = attributes(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}.") or not _is_ours():
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and found.origin is not None:
            if type(found.loader) is importlib.machinery.SourceFileLoader:
                found.loader = _Loader(fullname, found.loader.path)
            return found
        if fullname not in deepspeed_names.table():
            return None
        is_package = "package" in deepspeed_names.table()[fullname]
        made = importlib.machinery.ModuleSpec(fullname, _Generated(), is_package=is_package)
        if is_package:
            made.submodule_search_locations = [str(HERE.joinpath(*fullname.split(".")[1:]))]
        return made


def _is_ours() -> bool:
    """Whether `deepspeed` is this package. After penstock.deepspeed.uninstall() the name may belong
    to another package."""
    file = getattr(sys.modules.get(_PACKAGE), "__file__", None)
    return file is not None and pathlib.Path(file).parent == HERE


sys.meta_path[:] = [
    one for one in sys.meta_path if getattr(one, "__module__", "") != __name__
]  # without the finder of an earlier import
sys.meta_path.insert(0, _Finder())
