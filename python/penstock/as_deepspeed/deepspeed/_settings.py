"""Objects with the keys of a config section as attributes."""

from __future__ import annotations

import copy
import difflib
import enum
import importlib
import json
import sys
import types
import typing
from typing import Any, ClassVar

from penstock import ConfigError
from penstock._native import _penstock
from penstock.front import config_file

from ._refusal import DeepSpeedRefusal

# Class -> the section of the config that has the same keys and values.
_SECTIONS = {
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "CommsLoggerConfig": "comms_logger",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
}
_LIKE = {"bool": "auto_cast", "int": "hysteresis"}  # kind -> a key of "fp16" of this kind


def _read(section: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the section as the engine reads it. Raises ConfigError if the engine refuses it."""
    outer, _, inner = section.partition(".")
    config = {outer: {inner: given, "stage": 3} if inner else given}
    text = json.dumps(config_file.finite(config))
    found = json.loads(_penstock.translate_deepspeed_config(text, 1).values)[outer]
    return dict(found[inner] if inner else found)


class Settings:
    """A section of the config: its keys are arguments and attributes.

    Numbers may be given as text, as in the config. A key that is not given has DeepSpeed's default.
    The object has no effect: only the config that initialize() receives counts. If a script derives
    a class from this one, the annotated attributes of that class become keys, too.

    Raises ConfigError, or pydantic's ValidationError if pydantic is in use, for an unknown key and
    for a value that is not allowed.
    """

    _KEYS: ClassVar[dict[str, Any]] = {}  # key -> [kind, default, other name of the key]
    _RENAMED: ClassVar[dict[str, Any]] = {}  # deprecated key -> (its new name, converter or None)

    def __init_subclass__(cls) -> None:
        own = {}
        for key, kind in vars(cls).get("__annotations__", {}).items():
            name, field = _named(kind), getattr(cls, key, None)
            default = getattr(field, "default", field)  # the default in pydantic's Field()
            plain = name in ("bool", "int", "float", "str", "list", "dict")
            other = [one for one in (getattr(field, "alias", None),) if one]
            own[key] = [name + "?" * (default is None) if plain else "", default, *other]
            about = getattr(field, "json_schema_extra", None) or {}
            if about.get("deprecated") and about.get("new_param"):
                renamed = {key: (about["new_param"], about.get("new_param_fn"))}
                cls._RENAMED = {**cls._RENAMED, **renamed}
        cls._KEYS = {**cls._KEYS, **{key: one for key, one in own.items() if key[0] != "_"}}

    def __init__(self, strict: bool = False, **given: Any) -> None:
        try:
            self._take(strict, given)
        except ConfigError as error:
            if isinstance(error, DeepSpeedRefusal):
                raise
            raise _as_pydantic(type(self).__name__, given, error) from error

    def _take(self, strict: bool, given: dict[str, Any]) -> None:
        names = {name: key for key, (_, _, *other) in self._KEYS.items() for name in (key, *other)}
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"allowed: {[*names]}"
                raise ConfigError(f"[deepspeed::{type(self).__name__}] no key {key!r}: {advice}")
        if not strict:  # "auto" selects the default
            given = {key: value for key, value in given.items() if value != "auto"}
        section = _SECTIONS.get(type(self).__name__)
        if section is not None:
            plain = {
                key: one.model_dump() if isinstance(one, Settings) else one
                for key, one in given.items()
            }
            given = _read(section, plain)
        values = {names[key]: value for key, value in given.items() if key in names}
        for key in [key for key in self._RENAMED if key in values]:
            new, convert = self._RENAMED[key]
            if new in values:
                raise DeepSpeedRefusal(
                    f"[deepspeed::{type(self).__name__}] {key!r} and {new!r} are the same key: "
                    f"keep only {new!r}"
                )
            values[new] = convert(values[key]) if convert else values[key]
        for key, (kind, default, *_) in self._KEYS.items():
            value = values.get(key, copy.deepcopy(default))
            setattr(self, key, self._as(key, kind, value))

    def _as(self, key: str, kind: str, value: Any) -> Any:
        """Converts a value to its kind: a plain type, or the full name of an enum or section."""
        home, _, name = kind.removesuffix("?").rpartition(".")
        made: Any = getattr(importlib.import_module(home), name) if home else None
        if value is None and (kind in ("", f"{home}.{name}?", f"{name}?")):
            return None
        try:
            if made is None:
                return _plain(name, value)
            if isinstance(value, made):
                return value
            if issubclass(made, Settings):
                return made(**value)
            return made(_plain("int", value) if issubclass(made, int) else value)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            allowed = name if made is None else ", ".join(map(repr, _allowed(made)))
            raise ConfigError(
                f"[deepspeed::{type(self).__name__}] {key} is {value!r}; allowed: {allowed}"
            ) from error

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Returns the section as a dict."""
        held = {key: getattr(self, key) for key in self._KEYS}
        held = {key: one.model_dump() if hasattr(one, "model_dump") else one
                for key, one in held.items()}  # fmt: skip
        return {key: one.value if isinstance(one, enum.Enum) else one for key, one in held.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment] # its values can change


def _named(kind: Any) -> str:
    """Returns the name of a type without `| None` and arguments: "list" for `list[int] | None`."""
    of = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and len(of) == 1:
        return _named(of[0])
    found = typing.get_origin(kind) or kind
    return getattr(found, "__name__", str(found))


def _allowed(kind: Any) -> list[Any]:
    return [one.value for one in kind] if issubclass(kind, enum.Enum) else ["a section"]


def _as_pydantic(name: str, given: Any, error: ValueError) -> ValueError:
    """Returns the error, as pydantic's ValidationError if pydantic is in use."""
    core: Any = sys.modules.get("pydantic_core")
    if core is None:
        return error
    kind = core.PydanticCustomError("config", "{text}", {"text": str(error)})
    made: ValueError = core.ValidationError.from_exception_data(
        name, [{"type": kind, "loc": (), "input": given}]
    )
    return made


def _plain(kind: str, value: Any) -> Any:
    """Converts a number, a text or a truth value without loss, as DeepSpeed's classes do."""
    if kind in _LIKE:
        try:
            return _read("fp16", {_LIKE[kind]: value})[_LIKE[kind]]
        except ConfigError as error:  # its text names a key of "fp16", not the script's key
            raise TypeError(value) from error
    if kind == "float":
        return float(value)
    checked = {"str": str, "list": list, "dict": dict}
    if kind in checked and not isinstance(value, checked[kind]):
        raise TypeError(value)
    return value
