"""Reads and writes checkpoint files with torch.save() and torch.load(), for scripts."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...utils.logging import warning_once


class _Patched(type):
    """Warns when a script replaces a method, because the engine does not call it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        warning_once(
            f"[deepspeed] {cls.__name__}.{name} was replaced, but only the script's own calls use "
            f"the replacement. engine.save_checkpoint() and load_checkpoint() write and read their "
            f"own files"
        )
        super().__setattr__(name, value)


class TorchCheckpointEngine(metaclass=_Patched):
    """Writes with torch.save() and reads with torch.load(weights_only=False), so load only files
    that you trust. A script may call it; the engine does not."""

    def __init__(self, config_params: Any = None) -> None:
        self.config = config_params

    def create(self, info: Any) -> None:
        """Does nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Returns True: each file is complete when save() returns."""
        return True
