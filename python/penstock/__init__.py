"""Penstock: sharded training of PyTorch models, with a strategy as a table and a C++ engine.

engine = penstock.initialize(model, {"strategy": "zero3", "optimizer": {"lr": 1e-3}})
loss = engine(batch)
engine.backward(loss)
engine.step()
"""

from penstock import one_host as one_host  # registers the back end "penstock"
from penstock._native import Bug, ConfigError, RuntimeFault
from penstock.data import ResumableLoader
from penstock.engine import Engine, initialize
from penstock.ledger import format_ledger
from penstock.monitor import trace
from penstock.optimizer import Lion
from penstock.sharded_init import init

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
