"""Switches on the package `deepspeed` that runs on Penstock, for scripts written for DeepSpeed.

Three ways, all before the first `import deepspeed`: `penstock run --as-deepspeed script.py`, the
environment variable PENSTOCK_AS_DEEPSPEED=1, or `penstock.deepspeed.install()`. It is in a folder
of its own (as_deepspeed/), so that it is never found by accident.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

from penstock._native import ConfigError

# What looks for deepspeed once, when it is imported.
_DECIDE = ("accelerate.accelerator", "transformers.integrations.deepspeed")
FOLDER = pathlib.Path(__file__).parent / "as_deepspeed"


def installed() -> bool:
    """Whether `import deepspeed` finds ours."""
    return str(FOLDER) in sys.path


def install() -> None:
    """From here on `import deepspeed` is Penstock's, and so is its distribution's metadata.

    Raises ConfigError where another `deepspeed` was imported already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(str(FOLDER)):
        raise ConfigError(
            f"[deepspeed::install] another deepspeed was imported already "
            f"({getattr(loaded, '__file__', None)}): call install() before anything imports it"
        )
    early = [one for one in _DECIDE if one in sys.modules]
    if early and not installed():
        raise ConfigError(
            f"[deepspeed::install] {early[0]} was imported already and has found no deepspeed: "
            f"call install() (or import penstock.hf, penstock.lightning) before"
        )
    if not installed():
        sys.path.insert(0, str(FOLDER))
        importlib.invalidate_caches()


def uninstall() -> None:
    """Ends it for what is imported from now on."""
    while str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))
    importlib.invalidate_caches()
