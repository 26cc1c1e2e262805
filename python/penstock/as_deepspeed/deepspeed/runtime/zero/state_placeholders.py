"""Results of plain module calls on a model with sharded parameters. No rank has all their values.

`module.state_dict()` has empty tensors for them, as in DeepSpeed, because scripts hash, pickle or
list such a dict on one rank. `module.cpu()` and `module.to(device)` do not move their shards, as in
DeepSpeed: Lightning moves a model to the CPU when training ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.front import sharded_init
from penstock.front.engine import engine_of

from ...utils.logging import logger

_fill = torch.nn.Module._save_to_state_dict
_convert: Callable[..., Any] = torch.nn.Module._apply
_told: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        logger.warning(text)


def is_readable(param: torch.Tensor) -> bool:
    """Whether this rank has the tensor's values."""
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
        if param is None or not hasattr(param, "ds_id") or is_readable(param):
            continue
        destination[prefix + name] = torch.empty(0, dtype=param.dtype, device=param.device)
        if engine_of(param) is not None or not sharded_init.is_open():
            _warn_once(
                "module.state_dict() has empty tensors for the parameters that ZeRO-3 shards. "
                "engine.save_16bit_model() saves their values"
            )


def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """Converts a module, except an engine's sharded parameters if `fn` would only move them."""

    def kept(tensor: torch.Tensor) -> Any:
        if not hasattr(tensor, "ds_id") or is_readable(tensor) or engine_of(tensor) is None:
            return fn(tensor)
        like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        found = fn(like)
        if found.dtype != like.dtype or found.device == like.device:
            return fn(tensor)
        _warn_once(
            f"a module was moved to {found.device}, but the parameters that ZeRO-3 shards stay on "
            f"{tensor.device}"
        )
        return tensor

    return _convert(self, kept, recurse)


def install() -> None:
    """Replaces the methods of torch.nn.Module that fill the dict and convert parameters."""
    torch.nn.Module._save_to_state_dict = _save_to_state_dict  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
