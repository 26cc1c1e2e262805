"""Penstock: sharded training of PyTorch models. A table describes a strategy; the engine is C++.

engine = penstock.initialize(model, {"strategy": "zero3", "optimizer": {"lr": 1e-3}})
loss = engine(batch)
engine.backward(loss)
engine.step()

A public name is imported when it is first used, so that commands can start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.front import registration

if TYPE_CHECKING:
    from penstock._native import Bug, ConfigError, RuntimeFault
    from penstock.front.data import ResumableLoader
    from penstock.front.engine import Engine, initialize
    from penstock.front.ledger import format_ledger
    from penstock.front.optimizer import Lion
    from penstock.front.sharded_init import init
    from penstock.monitor.timelines import trace

__version__ = "0.1.0"
__all__ = [
    "Bug",
    "ConfigError",
    "Engine",
    "Lion",
    "ResumableLoader",
    "RuntimeFault",
    "format_ledger",
    "init",
    "initialize",
    "trace",
]

# Public name -> the module that defines it.
_HOMES = {
    "Bug": "penstock._native",
    "ConfigError": "penstock._native",
    "Engine": "penstock.front.engine",
    "Lion": "penstock.front.optimizer",
    "ResumableLoader": "penstock.front.data",
    "RuntimeFault": "penstock._native",
    "format_ledger": "penstock.front.ledger",
    "init": "penstock.front.sharded_init",
    "initialize": "penstock.front.engine",
    "trace": "penstock.monitor.timelines",
}
# Public modules that can be used after `import penstock`, without importing them one by one.
_MODULES = ("data", "deepspeed", "environment", "launch", "monitor", "schedules")

registration.arrange()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
