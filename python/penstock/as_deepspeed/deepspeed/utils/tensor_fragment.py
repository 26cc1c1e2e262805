"""fp32 weights, gradients and optimizer state of one parameter, whole or this rank's part.

All ranks call these together. "Local" is a copy of this rank's elements, flat and without padding:
the engine cuts a unit and not each parameter, so a rank may have all of one, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock import ConfigError
from penstock.front.engine import Engine, engine_of

from .logging import warning_once


@dataclasses.dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's checkpoints name it so
    """A part of a flat buffer."""

    numel: int
    start: int


_AT_ONCE = "safe_set_*_fp32_param: the weight is the new one at once, not after the next step"
_NAMES = {"fp32": "param"}


def _engine(param: torch.Tensor) -> Engine:
    engine = engine_of(param)
    if engine is None:
        raise ConfigError("[deepspeed::safe_*] the tensor is no parameter of an engine's model")
    return engine


def _keeps(engine: Engine, param: torch.Tensor, name: str) -> bool:
    return param.requires_grad and (name == "param" or name in engine.state_names())


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """A copy of the fp32 master; None where it does not train."""
    engine = _engine(param)
    return engine.param_state(param, "param") if param.requires_grad else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the fp32 master, and with it the weight."""
    warning_once(
        "safe_set_*_fp32_param: the weight is the new one at once, not after the next step"
    )
    _engine(param).set_param_state(param, "param", value)


def safe_get_full_optimizer_state(
    param: torch.nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """A copy of "exp_avg", "exp_avg_sq", ...; None where none is kept."""
    engine, name = _engine(param), _NAMES.get(optim_state_key, optim_state_key)
    return engine.param_state(param, name) if _keeps(engine, param, name) else None


def safe_set_full_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replaces it."""
    _engine(param).set_param_state(param, _NAMES.get(optim_state_key, optim_state_key), value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The averaged fp32 gradient, after backward and before step; None where it does not train."""
    if not param.requires_grad:
        return None
    return _engine(param).param_grad(param)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the averaged gradient, after the window's last backward."""
    engine = _engine(param)
    engine.set_grads({engine.name_of(param): value})


def safe_update_full_grad_vectorized(
    params: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replaces gradients by `update_func(gradient, parameter)`."""
    for param in params:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the master."""
    return _engine(param).local_state(param, "param")[1] if param.requires_grad else None


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's elements of the master, and of the weight."""
    warning_once(
        "safe_set_*_fp32_param: the weight is the new one at once, not after the next step"
    )
    _engine(param).set_local_state(param, "param", value)


def safe_get_local_optimizer_state(
    param: torch.nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """This rank's elements of "exp_avg", "exp_avg_sq", ..."""
    engine, name = _engine(param), _NAMES.get(optim_state_key, optim_state_key)
    return engine.local_state(param, name)[1] if _keeps(engine, param, name) else None


def safe_set_local_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    _engine(param).set_local_state(param, _NAMES.get(optim_state_key, optim_state_key), value)


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The elements of the averaged gradient that belong to this rank's part of the master."""
    gradient = safe_get_full_grad(param)
    if gradient is None:
        return None
    begin, own = _engine(param).local_state(param, "param")
    return gradient.flatten()[begin : begin + own.numel()].clone()


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Raises ConfigError: gradients are replaced whole (safe_set_full_grad)."""
    raise ConfigError("[deepspeed::safe_set_local_grad] use safe_set_full_grad()")


def get_full_hp_param(self: Any, optim_state_key: str | None = None) -> torch.Tensor | None:
    """As a method of a parameter."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)
