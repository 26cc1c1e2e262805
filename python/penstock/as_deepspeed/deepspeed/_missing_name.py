"""DeepSpeed's names that Penstock does not support. They can be imported, and raise when used."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NoReturn

from penstock import ConfigError
from penstock.deepspeed_names import TENSOR as TENSOR


def _refusal(name: str, instead: str) -> ConfigError:
    return ConfigError(f"[deepspeed] {name} is not supported by Penstock: {instead}")


def function(name: str, instead: str) -> Callable[..., Any]:
    """Returns a function that raises ConfigError when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refusal(name, instead)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not supported: {instead}."
    return refuse


class _MissingClass(abc.ABCMeta):
    """The type of a class that cannot be instantiated or patched; a script may derive from it."""

    def _refused(cls) -> tuple[str, str]:
        found: tuple[str, str] = next(
            vars(one)["_missing"] for one in cls.__mro__ if "_missing" in vars(one)
        )
        return found

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(*cls._refused())

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        full, instead = cls._refused()
        raise AttributeError(f"[deepspeed] {full}.{name} is not supported by Penstock: {instead}")

    def __setattr__(cls, name: str, value: Any) -> None:
        if "_missing" in vars(cls) and not name.startswith("_"):
            full, instead = cls._refused()
            raise _refusal(f"an assignment to {full}.{name}", instead)
        super().__setattr__(name, value)


def cls(name: str, instead: str, bases: tuple[type, ...] = ()) -> type:
    """Returns a class that raises ConfigError when it, or a class derived from it, is instantiated
    or when one of its attributes is set."""
    return _MissingClass(
        name.rpartition(".")[2],
        bases,
        {"_missing": (name, instead), "__doc__": f"Not supported: {instead}."},
    )


class Thing:
    """A module-level object that raises ConfigError whenever it is used."""

    def __init__(self, name: str, instead: str) -> None:
        self.__dict__["_refused"] = (name, instead)

    def __repr__(self) -> str:
        return f"<{self._refused[0]}: not supported by Penstock>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(*self._refused)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse
    __setattr__ = __setitem__ = __enter__ = __exit__ = _refuse
