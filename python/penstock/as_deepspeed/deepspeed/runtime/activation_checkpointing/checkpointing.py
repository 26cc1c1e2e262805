"""Activation checkpointing: DeepSpeed's names for torch's functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from penstock import ConfigError

from ...utils.logging import logger

_configured = False


def configure(  # noqa: PLR0913 - DeepSpeed's signature
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepted, without effect: saved inputs stay whole on their device.

    The native keys offload.activations and activations.checkpoint change this.
    """
    global _configured
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    chosen = [name for name, value in asked.items() if value]
    if chosen:
        logger.warning(f"deepspeed.checkpointing: no effect in Penstock: {', '.join(chosen)}")
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Does nothing: no state is kept between steps."""


def _as_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function; when it runs again, the tracker's generators draw the same values."""
    first: list[dict[str, torch.Tensor]] = []

    def run(*args: Any) -> Any:
        if not first:
            first.append(_tracker.get_states())
            return function(*args)
        now = _tracker.get_states()
        _tracker.set_states(dict(first[0]))
        try:
            return function(*args)
        finally:
            _tracker.set_states(now)

    return run


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` and saves only its inputs; backward runs it again."""
    return torch.utils.checkpoint.checkpoint(_as_before(function), *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as checkpoint(), without a nested backward."""
    return torch.utils.checkpoint.checkpoint(_as_before(function), *args, use_reentrant=False)


class CheckpointFunction:
    """`apply(function, all_outputs, *args)`, for old scripts."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        made = checkpoint(function, *args)
        all_outputs.extend(made if isinstance(made, (tuple, list)) else [made])


class CudaRNGStatesTracker:
    """Random generators by name, for layers that must draw equal or different values on ranks."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise ConfigError(f"[deepspeed::checkpointing] the generator {name!r} exists already")
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Makes torch draw from that generator inside the context."""
        if name not in self.states_:
            raise ConfigError(f"[deepspeed::checkpointing] there is no generator {name!r}")
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_set_cuda_rng_state = torch.set_rng_state
_tracker = _CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds torch and the generator of model-parallel layers."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepted, without effect: see configure()."""


def set_num_layers(nlayers: int) -> None:
    """Accepted, without effect: see configure()."""
