"""Activation checkpointing: DeepSpeed's names for torch's functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from penstock import ConfigError
from penstock.front.recompute import GENERATORS

from ..._refusal import DeepSpeedRefusal
from ...accelerator.real_accelerator import get_accelerator
from ...utils.bwc import bwc_tensor_model_parallel_rank
from ...utils.logging import logger
from ..config import as_dict

mpu: Any = None  # from the last configure(), for the ranks' seeds
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
    """Sets the mpu whose tensor ranks get different seeds (model_parallel_cuda_manual_seed()).

    Saved inputs stay whole on their device: the other arguments have no effect, and a warning lists
    those that are set. The native keys offload.activations and activations.checkpoint change this.

    Raises ConfigError for contiguous checkpointing without the two settings that it needs.
    """
    global _configured, mpu
    mpu = mpu if mpu_ is None else mpu_
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        section = as_dict(deepspeed_config).get("activation_checkpointing") or {}
    asked = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    asked = {**section, **{name: value for name, value in asked.items() if value is not None}}
    count = num_checkpoints or section.get("number_checkpoints")
    if asked.get("contiguous_memory_optimization") and not (
        asked.get("partition_activations") and count
    ):
        raise DeepSpeedRefusal(
            "[deepspeed::configure] contiguous checkpointing also needs partitioned activations "
            "and the number of layers (num_checkpoints), as in DeepSpeed: set both, or remove "
            "contiguous checkpointing, which has no effect here"
        )
    chosen = [name for name, value in asked.items() if value]
    if chosen:
        logger.warning(
            f"deepspeed.checkpointing: settings without effect in Penstock: {', '.join(chosen)}"
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Does nothing: no state is kept between steps."""


def _as_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function. When it runs again, the tracker's generators draw the same values."""
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


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function` and saves only its inputs; backward runs it again.

    Returns a list or tuple of outputs as a tuple, and a single output as itself.
    """
    return _checkpoint(True, function, args, kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as checkpoint(), without a nested backward."""
    return _checkpoint(False, function, args, {})


def _checkpoint(reentrant: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names = [*kwargs]

    def run(*given: Any) -> Any:  # tensors that are passed by name get gradients, too
        return function(*given[: len(args)], **dict(zip(names, given[len(args) :], strict=True)))

    made = torch.utils.checkpoint.checkpoint(
        _as_before(run), *args, *kwargs.values(), use_reentrant=reentrant
    )
    if not isinstance(made, (tuple, list)):
        return made
    return made[0] if len(made) == 1 else tuple(made)


class CheckpointFunction:
    """`apply(function, all_outputs, *args)`, for old scripts."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        made = checkpoint(function, *args)
        all_outputs.extend(made if isinstance(made, (tuple, list)) else [made])


def _rng_state() -> torch.Tensor:
    state: torch.Tensor = get_accelerator().get_rng_state()
    return state


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Sets the state of the accelerator's generator, or of the CPU's on a machine without one."""
    get_accelerator().set_rng_state(new_state, *(() if device < 0 else (device,)))


class CudaRNGStatesTracker:
    """Named random generators, for layers that must draw equal or different values on the ranks.

    They are generators of the device of get_accelerator().
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if name in self.states_ or seed in self.seeds_:
            raise ConfigError(
                f"[deepspeed::checkpointing] the generator {name!r} or the seed {seed} exists "
                f"already: call reset() first"
            )
        self.seeds_.add(seed)
        before, on_host = _rng_state(), torch.get_rng_state()
        torch.manual_seed(seed)  # of the host and of all devices
        self.states_[name] = _rng_state()
        torch.set_rng_state(on_host)
        _set_cuda_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Makes torch draw from the generator with this name inside the context."""
        if name not in self.states_:
            raise ConfigError(
                f"[deepspeed::checkpointing] there is no generator {name!r}: call add() first"
            )
        before = _rng_state()
        _set_cuda_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _rng_state()
            _set_cuda_rng_state(before)


_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_tracker = _CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()
GENERATORS.append((_tracker.get_states, lambda states: _tracker.set_states(dict(states))))


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds torch, and the generator of model-parallel layers.

    Torch's seed is the same on all tensor ranks. The other generator draws different numbers on
    each tensor rank of the mpu that configure() got, and the same on all data ranks.
    """
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, _seed_of_tensor_rank(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds only the generator of model-parallel layers."""
    with _tracker.fork():
        torch.manual_seed(_seed_of_tensor_rank(seed))


def _seed_of_tensor_rank(seed: int) -> int:
    return seed + 2718 + bwc_tensor_model_parallel_rank(mpu)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepted, without effect: see configure()."""


def set_num_layers(nlayers: int) -> None:
    """Accepted, without effect: see configure()."""
