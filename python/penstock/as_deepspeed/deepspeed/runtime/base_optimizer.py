"""The optimizer that initialize() returns: the engine's update with torch's parameter groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock import ConfigError, RuntimeFault
from penstock.front import optimizer as optimizers

from .fp16.loss_scaler import EngineLossScale


class EngineState(optimizers._State):
    """The optimizer state by parameter: copies of this rank's elements.

    A copy is flat, unless the rank keeps all elements of the parameter. An edit of a copy has no
    effect: if the last copy that was read has been edited, the next step raises ConfigError.
    """

    def __init__(self, native: Any, optimizer: torch.optim.Optimizer) -> None:
        self._native, self._optimizer = weakref.ref(native), weakref.ref(optimizer)
        self._read: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self._hook: Any = None

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        native, optimizer = self._native(), self._optimizer()
        if native is None or optimizer is None or all(param is not one for one in self):
            raise KeyError(param)
        made = {name: native.local_state(param, name)[1] for name in native.state_names()}
        # A parameter of another stage has no elements here.
        keeps = all(one.numel() == param.numel() for one in made.values())
        if native.config.strategy == "ddp" and keeps:
            made = {name: one.view(param.shape) for name, one in made.items()}
        self._read |= {(id(param), name): (one, one._version) for name, one in made.items()}
        self._hook = self._hook or optimizer.register_step_pre_hook(self._check)
        return made

    def _check(self, *_: Any) -> None:
        read, self._read = self._read, {}
        self._hook.remove()
        self._hook = None
        edited = {name for (_, name), (one, version) in read.items() if one._version != version}
        if edited:
            raise ConfigError(
                f"[deepspeed::optimizer] optimizer.state returns copies, so the edit of "
                f'"{min(edited)}" has no effect: use '
                f"deepspeed.utils.safe_set_full_optimizer_state()"
            )

    def __iter__(self) -> Iterator[torch.Tensor]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return iter([one for group in groups for one in group["params"]])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return len(self) > 0

    __contains__: Any = Mapping.__contains__
    keys: Any = Mapping.keys
    values: Any = Mapping.values
    items: Any = Mapping.items
    get: Any = Mapping.get


class _Unsaved(dict[str, Any]):
    """A state_dict() without the state. Pickling it raises, so it is not saved as a checkpoint."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeFault(
            "[deepspeed::optimizer] the dict that state_dict() returns cannot be saved: the engine "
            "keeps the optimizer state. Save it with engine.save_checkpoint()"
        )


class DeepSpeedOptimizer:
    """Base class, for isinstance()."""


class BF16_Optimizer:  # noqa: N801 - DeepSpeed's name
    """For isinstance(). No optimizer of the engine is an instance of it."""


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
        """The torch optimizer's state: an EngineState, if the engine computes the update."""
        return self.optimizer.state

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
        """Flat copies of this rank's fp32 masters, by parameter group."""
        return [self._masters(group) for group in self.param_groups]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat  # ZeRO-1 and 2
    fp32_groups_flat = fp32_partitioned_groups_flat  # stage 0

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
        ours = self._ours()
        ours._loss_scaled()
        try:
            ours.native.backward(loss, retain_graph=retain_graph)
        finally:
            ours._weigh_all()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._ours()._weighted(loss * self.loss_scale)
        return scaled

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
            "[deepspeed::optimizer] load_state_dict() is not supported, because the engine keeps "
            "the optimizer state: load it with engine.load_checkpoint()"
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


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of ZeRO-1 (optimizer state is sharded) and ZeRO-2 (gradients, too)."""


class FP16_Optimizer(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of fp16 and bf16 at stage 0 with FusedAdam; nothing is sharded."""


class FP16_UnfusedOptimizer(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of fp16 and bf16 at stage 0 without FusedAdam."""
