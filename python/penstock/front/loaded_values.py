"""Records the values that are copied into low-precision parameters, before they are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDED = (torch.bfloat16, torch.float16)


class LoadedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records copies of wider values into whole parameters.

    Attributes:
        found: the values that were copied last, by the parameter's name. They are not cloned.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A parameter has different memory inside and outside gathered().
        self._names = {_place(param): name for param, name in names.items()}
        self.found: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return result

    def _note(self, param: torch.Tensor, values: torch.Tensor) -> None:
        name = self._names.get(_place(param)) if param.dtype in _ROUNDED else None
        if name is None:
            return
        wider = values.is_floating_point() and values.itemsize > param.itemsize
        if wider and values.shape == param.shape:
            self.found[name] = values
        else:  # the parameter holds these values exactly
            self.found.pop(name, None)


def _place(param: torch.Tensor) -> tuple[int, int, torch.Size]:
    return param.untyped_storage()._cdata, int(param.storage_offset()), param.shape
