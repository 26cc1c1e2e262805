"""fp32 weights, gradients and optimizer state of one parameter: whole, or this rank's part.

All ranks must call these functions, except safe_get_local_fp32_param() and
safe_get_local_optimizer_state(). "Local" values are copies of this rank's elements, flat and
without padding. The engine shards units, not single parameters, so a rank may have all or none of a
parameter's elements. Gradients do not include the loss scale of fp16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from penstock import ConfigError
from penstock.front.engine import Engine, engine_of

from ..comm import comm
from ..comm.comm import get_rank
from .logging import warning_once


@dataclasses.dataclass
class fragment_address:  # noqa: N801 - the name in DeepSpeed's checkpoints
    """A part of a flat buffer."""

    numel: int
    start: int


_NAMES = {"fp32": "param"}


def _engine(param: torch.Tensor) -> Engine:
    engine = engine_of(param)
    if engine is None:
        raise ConfigError(
            "[deepspeed::safe_*] the tensor is not a parameter of a model with an engine"
        )
    return engine


def _keeps(engine: Engine, param: torch.Tensor, name: str) -> bool:
    return param.requires_grad and (name == "param" or name in engine.state_names())


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of the fp32 master; None if the parameter does not train."""
    engine = _engine(param)
    return engine.param_state(param, "param") if param.requires_grad else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the fp32 master, and with it the weight. All ranks must pass the same values."""
    warning_once("safe_set_*_fp32_param: the weight changes at once, not after the next step")
    _engine(param).set_param_state(param, "param", value)


def safe_get_full_optimizer_state(
    param: torch.nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Returns a copy of "exp_avg", "exp_avg_sq", ...; None if the optimizer does not keep it."""
    engine, name = _engine(param), _NAMES.get(optim_state_key, optim_state_key)
    return engine.param_state(param, name) if _keeps(engine, param, name) else None


def safe_set_full_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replaces "exp_avg", "exp_avg_sq", ..."""
    _engine(param).set_param_state(param, _NAMES.get(optim_state_key, optim_state_key), value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns the averaged fp32 gradient; None if the parameter does not train.

    Call it after backward and before step.
    """
    if not param.requires_grad:
        return None
    return _engine(param).param_grad(param)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the averaged gradient. Call it after the accumulation window's last backward.

    If ranks pass different values, each rank's values count for one contiguous part of the
    elements, as in DeepSpeed's flat buffers. The parts are equal. At stage 0, different values
    raise ConfigError.
    """
    engine = _engine(param)
    try:
        engine.set_grads({engine.name_of(param): value})
    except ConfigError as error:
        if "on every rank" not in str(error) or engine.config.strategy == "ddp":
            raise
        warning_once("safe_set_full_grad: ranks pass different values; each sets only its part")
        run = -(-value.numel() // dist.get_world_size())
        begin, mixed = get_rank() * run, torch.zeros_like(value, dtype=torch.float32).flatten()
        mixed[begin : begin + run] = value.flatten()[begin : begin + run]
        comm._reduce_values(mixed)
        engine.set_grads({engine.name_of(param): mixed.view(param.shape)})


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replaces the gradient of each parameter that trains by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's elements of the master; None if the parameter does not train."""
    return _engine(param).local_state(param, "param")[1] if param.requires_grad else None


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's elements of the master, and of the weight."""
    warning_once("safe_set_*_fp32_param: the weight changes at once, not after the next step")
    _engine(param).set_local_state(param, "param", value)


def safe_get_local_optimizer_state(
    param: torch.nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Returns this rank's elements of "exp_avg", "exp_avg_sq", ...; None if not kept."""
    engine, name = _engine(param), _NAMES.get(optim_state_key, optim_state_key)
    return engine.local_state(param, name)[1] if _keeps(engine, param, name) else None


def safe_set_local_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    _engine(param).set_local_state(param, _NAMES.get(optim_state_key, optim_state_key), value)


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns the elements of the averaged gradient that match this rank's part of the master.

    All ranks must call it, because gradients may still have to be averaged.
    """
    gradient = safe_get_full_grad(param)
    if gradient is None:
        return None
    begin, own = _engine(param).local_state(param, "param")
    return gradient.flatten()[begin : begin + own.numel()].clone()


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the elements that safe_get_local_grad() returns. All ranks must call it.

    Raises ConfigError if the parameter has no gradient, or a rank gives another number of elements.
    """
    engine = _engine(param)
    begin, own = engine.local_state(param, "param")
    fits = value.numel() == own.numel()
    # The new gradient, the number of ranks that give each element, and the number of ranks that
    # give a wrong number of elements.
    given = torch.zeros(2 * param.numel() + 1, dtype=torch.float32)
    sums, counts, wrong = torch.split(given, [param.numel(), param.numel(), 1])
    if fits:
        sums[begin : begin + own.numel()] = value.detach().flatten().cpu()
        counts[begin : begin + own.numel()] = 1.0
    wrong.fill_(float(not fits))
    comm._reduce_values(given)
    if wrong > 0 or not param.requires_grad:
        raise ConfigError(
            f"[deepspeed::safe_set_local_grad] rank {get_rank()} passes {value.numel()} elements "
            f"of {engine.name_of(param)!r}, but every rank must pass as many as "
            f"safe_get_local_grad() returns on it (on this rank: {own.numel()})"
        )
    safe_set_full_grad(param, (sums / counts).view(param.shape))
