"""DeepSpeed's names that Penstock does not support. They can be imported, and raise when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock import ConfigError

TENSOR = 'set "tensor_parallel": {"autotp_size": N} in the config (mesh.tensor)'


def _refusal(name: str, instead: str) -> ConfigError:
    return ConfigError(f"[deepspeed] {name} is not supported by Penstock: {instead}")


def function(name: str, instead: str) -> Callable[..., Any]:
    """Returns a function that raises ConfigError when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refusal(name, instead)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not supported: {instead}."
    return refuse


def cls(name: str, instead: str, bases: tuple[type, ...] = ()) -> type:
    """Returns a class that raises ConfigError when it is instantiated."""

    def refuse(_self: Any, *_: Any, **__: Any) -> None:
        raise _refusal(name, instead)

    return type(
        name.rpartition(".")[2],
        bases,
        {"__init__": refuse, "__doc__": f"Not supported: {instead}."},
    )
