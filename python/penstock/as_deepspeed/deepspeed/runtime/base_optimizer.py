"""The optimizer that initialize() returns: the engine's update with torch's parameter groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock import ConfigError, RuntimeFault

from .fp16.loss_scaler import EngineLossScale


class _State(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """The optimizer state by parameter: copies of this rank's elements."""

    def __init__(self, native: Any, groups: list[dict[str, Any]]) -> None:
        self._native = native
        self._params = {id(one): one for group in groups for one in group["params"]}

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if id(param) not in self._params:
            raise KeyError(param)
        names = self._native.state_names()
        return {name: self._native.local_state(param, name)[1] for name in names}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._params.values())

    def __len__(self) -> int:
        return len(self._params)


class _Unsaved(dict[str, Any]):
    """A state_dict() without the state. Pickling it raises, so it is not saved as a checkpoint."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeFault(
            "[deepspeed::optimizer] state_dict() has no optimizer state to save, since the engine "
            "keeps it: save it with engine.save_checkpoint()"
        )


class DeepSpeedOptimizer:
    """Base class, for isinstance()."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose moments and masters are sharded in the engine.

    Attributes:
        optimizer: the torch optimizer with the parameter groups.
    """

    custom_loss_scaler = False

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self.optimizer = optimizer

    def _ours(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeFault("[deepspeed::optimizer] the optimizer's engine no longer exists")
        return engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups. Changed learning rates take effect in the next step."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        """The state by parameter. A value is a flat copy of this rank's elements.

        The copy is made when it is read. deepspeed.utils.safe_set_* changes the state.
        """
        native = self._ours().native
        return _State(native, self.param_groups) if native.state_names() else self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the engine's last step() was skipped because fp16 gradients overflowed."""
        return bool(self._ours().last_step_overflowed)

    @property
    def loss_scale(self) -> float:
        return float(self._ours().native.loss_scale)

    cur_scale = loss_scale

    def _get_loss_scale(self) -> float:
        return self.loss_scale

    def needs_scaler(self) -> bool:
        """Whether a plain `loss.backward()` needs a loss from engine.scale()."""
        return self.dynamic_loss_scale

    @property
    def loss_scaler(self) -> EngineLossScale:
        """The loss scale with its settings, and the count of steps."""
        return EngineLossScale(self._ours())

    loss_scale_config = loss_scaler

    @property
    def low_precision_dtype(self) -> torch.dtype:
        return torch.float16 if self._ours().fp16_enabled() else torch.bfloat16

    @property
    def dynamic_loss_scale(self) -> bool:
        native = self._ours().native
        return bool(native.config.precision == "fp16" and native.config.loss_scale.window > 0)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """Flat copies of this rank's fp32 masters, by parameter group (DeepSpeed's ZeRO-3)."""
        return [self._masters(group) for group in self.param_groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Flat copies of this rank's fp32 masters, by parameter group (ZeRO-1 and ZeRO-2)."""
        return self.fp32_partitioned_groups_flat

    def _masters(self, group: dict[str, Any]) -> torch.Tensor:
        native = self._ours().native
        parts = [native.local_state(param, "param")[1] for param in group["params"]]
        return torch.cat(parts) if parts else torch.empty(0)

    def step(self, closure: Any = None) -> None:
        """Updates the weights only. engine.step() also updates the counts and the scheduler."""
        if closure is not None:
            raise ConfigError("[deepspeed::optimizer] step() takes no closure")
        self._ours().update()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._ours().native.backward(loss, retain_graph=retain_graph)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the accumulation window, except with ZeRO-2, as in DeepSpeed."""
        if self._ours().zero_optimization_stage() != 2:
            self._ours().native.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups' options only. It cannot be pickled; use engine.save_checkpoint()."""
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        return _Unsaved({"param_groups": options, "state": {}})

    def load_state_dict(self, state_dict: Any, **_: Any) -> None:
        """Raises RuntimeFault. Use engine.load_checkpoint() instead."""
        raise RuntimeFault(
            "[deepspeed::optimizer] load_state_dict() is not supported, since the engine keeps the "
            "state: load it with engine.load_checkpoint()"
        )

    def offload_states(self, *args: Any, **options: Any) -> None:
        """See the engine's method."""
        self._ours().offload_states(*args, **options)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See the engine's method."""

    def refresh_fp32_params(self) -> None:
        """Does nothing: the engine finds edits of parameters between steps by itself."""

    def get_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.optimizer!r}"
