"""Entries of sharded parameters in `module.state_dict()`: empty tensors, as in DeepSpeed.

Scripts hash, pickle or list such a dict on one rank, which cannot gather the values.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.front import sharded_init
from penstock.front.engine import engine_of

from ...utils.logging import logger

_fill = torch.nn.Module._save_to_state_dict
_told: list[bool] = []


def _is_readable(param: torch.Tensor) -> bool:
    try:
        param.data_ptr()
    except RuntimeError:
        return False
    return True


def _save_to_state_dict(
    self: torch.nn.Module, destination: Any, prefix: str, keep_vars: bool
) -> None:
    _fill(self, destination, prefix, keep_vars)
    if keep_vars:
        return
    for name, param in self._parameters.items():
        if param is None or not hasattr(param, "ds_id") or _is_readable(param):
            continue
        destination[prefix + name] = torch.empty(0, dtype=param.dtype, device=param.device)
        if not _told and (engine_of(param) is not None or not sharded_init.is_open()):
            _told.append(True)
            logger.warning(
                "module.state_dict() has empty tensors for the parameters that ZeRO-3 shards. "
                "engine.save_16bit_model() saves their values"
            )


def install() -> None:
    """Replaces the method of torch.nn.Module that fills the dict."""
    torch.nn.Module._save_to_state_dict = _save_to_state_dict  # type: ignore[method-assign]
