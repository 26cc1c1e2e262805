"""Objects with the keys of a config section as attributes."""

from __future__ import annotations

import copy
import difflib
import enum
import importlib
import re
from typing import Any, ClassVar

from penstock import ConfigError

_WORDS = dict.fromkeys(("true", "t", "yes", "y", "on", "1", "1.0"), True)
_WORDS |= dict.fromkeys(("false", "f", "no", "n", "off", "0", "0.0"), False)


class Settings:
    """A section of the config: its keys are arguments and attributes.

    Numbers may be texts, as in the config. A key that is not given has DeepSpeed's default. The
    object has no effect: only the config that initialize() receives counts. If a script derives a
    class from it, the annotated attributes of that class become keys, too.

    Raises ConfigError for an unknown key and for a value of the wrong kind.
    """

    _KEYS: ClassVar[dict[str, Any]] = {}  # key -> [kind, default, other name of the key]

    def __init_subclass__(cls) -> None:
        own = {}
        for key, kind in vars(cls).get("__annotations__", {}).items():
            name, default = getattr(kind, "__name__", str(kind)), getattr(cls, key, None)
            default = getattr(default, "default", default)  # of pydantic's Field()
            plain = name in ("bool", "int", "float", "str")
            own[key] = [name + "?" * (default is None) if plain else "", default]
        cls._KEYS = {**cls._KEYS, **{key: one for key, one in own.items() if key[0] != "_"}}

    def __init__(self, strict: bool = False, **given: Any) -> None:
        names = {name: key for key, (_, _, *other) in self._KEYS.items() for name in (key, *other)}
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"allowed: {[*names]}"
                raise ConfigError(f"[deepspeed::{type(self).__name__}] no key {key!r}: {advice}")
        values = {names[key]: value for key, value in given.items()}
        if not strict:  # "auto" is the default
            values = {key: value for key, value in values.items() if value != "auto"}
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

    __hash__ = None  # type: ignore[assignment] # it can be changed


def _allowed(kind: Any) -> list[Any]:
    return [one.value for one in kind] if issubclass(kind, enum.Enum) else ["a section"]


def _plain(kind: str, value: Any) -> Any:
    """Converts a number, a text or a truth value without loss, as DeepSpeed's classes do."""
    if kind == "bool" and not isinstance(value, bool):
        return _WORDS[value.lower() if isinstance(value, str) else str(float(value))]
    if kind == "float":
        return float(value)
    if kind == "int":
        if isinstance(value, str):  # without an exponent
            return int(re.sub(r"\.0*\s*$", "", value))
        if value != int(value):
            raise ValueError(value)
        return int(value)
    if kind == "str" and not isinstance(value, str):
        raise TypeError(value)
    return value
