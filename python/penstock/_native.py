"""Loads the C++ module, and checks that it was built for the installed torch.

The C++ module needs torch's libraries. If possible, they are loaded without torch's Python package,
whose import takes longer than most commands.
"""

import importlib
import importlib.util
import pathlib
import re
import sys
from typing import Any


def _torch_version() -> str:
    """Returns the version of the installed torch without importing it, "" if there is none."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = pathlib.Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _import() -> Any:
    try:
        return importlib.import_module("penstock._penstock")
    except ImportError:
        if "torch" in sys.modules:
            raise
        importlib.import_module("torch")  # loads libraries that the dynamic loader does not find
        return importlib.import_module("penstock._penstock")


def _load() -> Any:
    version = _torch_version()
    found = ".".join(version.split(".")[:2])
    try:
        module = _import()
    except ImportError as error:
        raise ImportError(
            f"penstock's C++ module does not load with torch {version or '(not installed)'}. It is "
            f"built for one torch minor version. Reinstall penstock for this torch "
            f"(pip install --no-build-isolation penstock). Cause: {error}"
        ) from error
    if module.TORCH_MINOR != found:
        raise ImportError(
            f"penstock was built for torch {module.TORCH_MINOR}, but torch {found} is installed. "
            f"Reinstall penstock (pip install --no-build-isolation penstock)"
        )
    return module


_penstock: Any = _load()
Bug = _penstock.Bug
ConfigError = _penstock.ConfigError
RuntimeFault = _penstock.RuntimeFault
for _kind in (Bug, ConfigError, RuntimeFault):
    _kind.__module__ = "penstock"  # the public module, which tracebacks show


def _config_text(config: Any) -> str:
    """Returns every setting as JSON on one line."""
    return str(config.json())


_penstock.Config.__repr__ = _config_text
