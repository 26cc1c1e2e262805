"""Parameters of layers that tensor ranks cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from penstock.front.engine import engine_of

from ..runtime.zero.partition_parameters import GatheredParameters, is_zero_param


class GatherReplacedLayerParams(GatheredParameters):
    """Inside the context, parameters have their full values, including those that are cut.

    Args:
        params: a parameter, or several.
        module: accepted, without effect.
        enabled: False disables the context.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        module: Any = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        super().__init__(given, enabled=enabled)
        self._others = [one for one in given if enabled and not is_zero_param(one)]

    def __enter__(self) -> None:
        super().__enter__()
        assert self._stack is not None
        try:
            for one in self._others:
                engine = engine_of(one)
                if engine is not None:
                    self._stack.enter_context(engine.gathered([one]))
        except BaseException:
            self._stack.close()
            raise
