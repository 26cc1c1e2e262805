"""Loss scaler classes in DeepSpeed's checkpoints, and a view of the engine's own loss scale."""

from __future__ import annotations

import weakref
from typing import Any


class LossScalerBase:
    """A loss scale in a checkpoint."""

    cur_scale: Any
    dynamic: Any

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        return float(self.cur_scale)


class LossScaler(LossScalerBase):
    """A constant loss scale."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scale that adapts to overflows."""

    def __init__(self, init_scale: float = 2.0**32, **options: Any) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.__dict__.update(options)


class EngineLossScale(LossScalerBase):
    """The engine's loss scale, with the attributes of DeepSpeed's scalers. Values cannot be set."""

    def __init__(self, engine: Any) -> None:
        self._engine: Any = weakref.ref(engine)

    def __getattr__(self, name: str) -> Any:
        engine = None if name == "_engine" else self._engine()
        if engine is None:
            raise AttributeError(name)
        scale = engine._config.native.get("loss_scale") or {"window": 0}
        window, least = scale["window"], scale.get("min", 1.0)
        known = {
            "cur_iter": engine.global_steps,
            "dynamic": window > 0,
            "dynamic_loss_scale": window > 0,
            "scale_window": window or None,
            "min_scale": least,
            "min_loss_scale": least if window else None,
            "scale_factor": 2.0,
            "delayed_shift": scale.get("hysteresis", 1),
            "consecutive_hysteresis": scale.get("refill") == "step",
            "use_grad_scaling": engine._config.fp16_enabled,
        }
        if name not in known:
            raise AttributeError(f"the engine's loss scale has no {name!r}")
        return known[name]

    @property
    def cur_scale(self) -> float:
        return float(self._engine().native.loss_scale)

    def scale_loss(self, loss: Any) -> Any:
        return loss * self.cur_scale
