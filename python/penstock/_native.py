"""The C++ module, with a check that it was built for the torch that is installed."""

import importlib
from typing import Any

import torch


def _load() -> Any:
    found = ".".join(torch.__version__.split(".")[:2])
    try:
        module = importlib.import_module("penstock._penstock")
    except ImportError as error:
        raise ImportError(
            f"penstock's C++ module does not load with torch {torch.__version__}; it is built for "
            f"one torch minor version: reinstall penstock beside this torch "
            f"(pip install --no-build-isolation penstock). Cause: {error}"
        ) from error
    if module.TORCH_MINOR != found:
        raise ImportError(
            f"penstock was built for torch {module.TORCH_MINOR} and torch {found} is installed: "
            f"reinstall penstock (pip install --no-build-isolation penstock)"
        )
    return module


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """torch's `is_shared()` ends the process where a storage may not be read: it raises here."""
    storage.data_ptr()
    return torch._C.StorageBase.is_shared(storage)  # type: ignore[attr-defined,no-any-return]


_penstock: Any = _load()
torch.UntypedStorage.is_shared = _is_shared  # type: ignore[method-assign,assignment]
Bug = _penstock.Bug
ConfigError = _penstock.ConfigError
RuntimeFault = _penstock.RuntimeFault
for _kind in (Bug, ConfigError, RuntimeFault):
    _kind.__module__ = "penstock"  # as users import it, and as tracebacks show it


def _config_text(config: Any) -> str:
    """Every setting, as JSON on one line."""
    return str(config.json())


_penstock.Config.__repr__ = _config_text
