"""DeepSpeedHybridEngine: an engine whose `generate()` gathers sharded parameters once per call."""

from __future__ import annotations

from typing import Any

from penstock.front.forward_guard import Forward

from .engine import DeepSpeedEngine


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """Trains as DeepSpeedEngine does. `deepspeed.initialize()` creates it if the config sets
    `hybrid_engine.enabled`.

    `generate()` of the engine and of the module gathers the parameters of each rank once, if the
    model is in eval mode and if they take at most 4/5 of the memory that is left. Otherwise, and
    with `hybrid_engine.pin_parameters` false, each forward moves them as in training. All ranks
    must call it, as in stage 3 without this section. Below stage 3 each rank has all parameters.
    The model's own layers run. Training continues afterwards as if nothing had happened.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        section = self._config._values.get("hybrid_engine") or {}
        self._mode = "stream" if section.get("pin_parameters") is False else "auto"
        self._gathered = False
        generate = getattr(self.module, "generate", None)
        self._around = Forward(self.module, self._with_weights, "generate") if generate else None

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model's `generate()`. All ranks must call it."""
        return self.module.generate(*inputs, **kwargs)  # type: ignore[operator]

    def _with_weights(self, generate: Any, *inputs: Any, **kwargs: Any) -> Any:
        sharded = self.native._core.needs_unit_events
        if not sharded or self.module.training or self._gathered:
            return generate(*inputs, **kwargs)
        self._gathered = True
        try:
            with self.native.inference(self._mode):
                return generate(*inputs, **kwargs)
        finally:
            self._gathered = False

    def _leave_module(self) -> None:
        if self._around is not None:
            self._around.remove()
        super()._leave_module()


__all__ = ["DeepSpeedHybridEngine"]
