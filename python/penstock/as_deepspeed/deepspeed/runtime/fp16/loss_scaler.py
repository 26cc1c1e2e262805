"""Loss scaler classes in DeepSpeed's checkpoints. The engine itself does not use them."""

from __future__ import annotations

from typing import Any


class LossScalerBase:
    """A loss scale in a checkpoint."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        return self.cur_scale


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
