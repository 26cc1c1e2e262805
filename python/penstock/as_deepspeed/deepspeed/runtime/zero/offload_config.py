"""Types of the config sections offload_param and offload_optimizer."""

from __future__ import annotations

from typing import Any

from ... import _table

_Made: Any = _table.attributes(__name__)("DeepSpeedZeroOffloadOptimizerConfig")


class DeepSpeedZeroOffloadOptimizerConfig(_Made):  # type: ignore[misc]
    """The section offload_optimizer."""

    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)
