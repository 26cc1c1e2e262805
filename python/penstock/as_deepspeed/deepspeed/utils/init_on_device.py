"""OnDevice: builds a model on another device, such as "meta"."""

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    """Builds modules with this dtype on this device ("meta") inside the context."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._device: Any = None

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._device = torch.device(self.device)
            self._device.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)
