"""What initialize() returns as the optimizer: the engine's, with its parameter groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock import ConfigError, RuntimeFault


class _State(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """By parameter."""

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
    """What there is to see of an optimizer, which nobody shall mistake for all of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeFault(
            "[deepspeed::optimizer] the optimizer's state is in the engine, and state_dict() has "
            "none of it to save: engine.save_checkpoint() saves it"
        )


class DeepSpeedOptimizer:
    """Base class, for isinstance()."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The torch optimizer that has the groups is `optimizer`; moments and masters are sharded in
    the engine."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self.optimizer = optimizer

    def _ours(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeFault("[deepspeed::optimizer] its engine is gone")
        return engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the torch optimizer: change rates here."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def state(self) -> Any:
        """What is kept for each parameter: copies of this rank's elements, flat, made when they are
        looked at. To change them: deepspeed.utils.safe_set_*."""
        native = self._ours().native
        return _State(native, self.param_groups) if native.state_names() else self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the last step() of the engine was skipped, since fp16 gradients overflowed."""
        return bool(self._ours().last_step_overflowed)

    @property
    def loss_scale(self) -> float:
        return float(self._ours().native.loss_scale)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        native = self._ours().native
        return bool(native.config.precision == "fp16" and native.config.loss_scale.window > 0)

    @property
    def custom_loss_scaler(self) -> bool:
        return False

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """A copy of this rank's fp32 masters, flat, by parameter group. [ZeRO-3]"""
        return [self._masters(group) for group in self.param_groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """A copy of this rank's fp32 masters, flat, by parameter group. [ZeRO-1, ZeRO-2]"""
        return self.fp32_partitioned_groups_flat

    def _masters(self, group: dict[str, Any]) -> torch.Tensor:
        native = self._ours().native
        parts = [native.local_state(param, "param")[1] for param in group["params"]]
        return torch.cat(parts) if parts else torch.empty(0)

    def step(self, closure: Any = None) -> None:
        """Updates the weights alone: counts and the scheduler are engine.step()'s."""
        if closure is not None:
            raise ConfigError("[deepspeed::optimizer] step() takes no closure")
        self._ours().update()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._ours().native.backward(loss, retain_graph=retain_graph)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the window; as in DeepSpeed not with ZeRO-2."""
        if self._ours().zero_optimization_stage() != 2:
            self._ours().native.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The groups' options alone: it cannot be pickled, since save_checkpoint() saves it all."""
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        return _Unsaved({"param_groups": options, "state": {}})

    def load_state_dict(self, state_dict: Any, **_: Any) -> None:
        """Raises RuntimeFault: the engine's load_checkpoint() loads it."""
        raise RuntimeFault(
            "[deepspeed::optimizer] its state is in the engine: engine.load_checkpoint() loads it"
        )

    def refresh_fp32_params(self) -> None:
        """Nothing: edits of parameters between steps count by themselves."""

    def get_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.optimizer!r}"
