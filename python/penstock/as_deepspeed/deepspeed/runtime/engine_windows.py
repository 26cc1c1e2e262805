"""The part of the engine that determines when accumulation windows end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .._refusal import DeepSpeedRefusal


def _need_managed(managed: bool, name: str) -> None:
    if not managed:
        raise DeepSpeedRefusal(
            f"[deepspeed::{name}] {name}() is not supported if managed_gradient_accumulation is "
            f"false, as in DeepSpeed, because each step() then ends a window"
        )


class EngineWindows:
    """The part of DeepSpeedEngine that sets the ends of accumulation windows."""

    _config: Any
    _boundary: bool | None
    _managed: bool
    _stepping: bool
    _inside: str
    micro_steps: int
    gradient_accumulation_steps: Any

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates the weights.

        The value of set_gradient_accumulation_boundary() has precedence over the count. Without
        managed_gradient_accumulation it is True only inside step().
        """
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self._stepping
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether step() updates the weights, until the next call of this method.

        Raises ConfigError without managed_gradient_accumulation.
        """
        _need_managed(self._managed, "set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def _backward_epilogue(self) -> None:
        """Does nothing. Scripts that share a loss among engines call it after `loss.backward()`."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accepted, without effect: gradients accumulate in the same way without it.

        Raises ConfigError with ZeRO 2 and 3, and inside another such block.
        """
        if self._config.zero_optimization_stage >= 2:
            raise DeepSpeedRefusal(
                "[deepspeed::no_sync] the no_sync context manager is incompatible with ZeRO stages "
                "2 and 3, as in DeepSpeed"
            )
        with self._open_block("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accepted, without effect: gradients accumulate in the same way without it.

        Raises ConfigError at stage 0, without managed_gradient_accumulation, and inside another
        such block.
        """
        _need_managed(self._managed, "coalesce_grad_reduction")
        if self._config.zero_optimization_stage == 0:
            raise DeepSpeedRefusal(
                "[deepspeed::coalesce_grad_reduction] coalesce_grad_reduction() is not supported "
                "at stage 0, as in DeepSpeed: use no_sync()"
            )
        with self._open_block("coalesce_grad_reduction"):
            yield

    @contextlib.contextmanager
    def _open_block(self, name: str) -> Iterator[None]:
        if self._inside:
            raise DeepSpeedRefusal(
                f"[deepspeed::{name}] {name}() is not allowed inside {self._inside}(), as in "
                f"DeepSpeed ({name} context manager reentry is unsupported, and so are nested "
                f"contexts)"
            )
        self._inside = name
        try:
            yield
        finally:
            self._inside = ""
