"""Switches on the package `deepspeed` that runs on Penstock, for scripts written for DeepSpeed.

There are three ways, all before the first `import deepspeed`: `penstock run --as-deepspeed
script.py`, the environment variable PENSTOCK_AS_DEEPSPEED=1, or `penstock.deepspeed.install()`. The
package is in a separate folder (as_deepspeed/). Python finds it only if one of these ways was used.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

from penstock._native import ConfigError

# Modules that check for deepspeed only once, at their import.
_DECIDE = ("accelerate.accelerator", "transformers.integrations.deepspeed")
FOLDER = pathlib.Path(__file__).parent / "as_deepspeed"


def installed() -> bool:
    """Whether `import deepspeed` finds Penstock's package."""
    return str(FOLDER) in sys.path


def install() -> None:
    """Makes `import deepspeed` find Penstock's package and its distribution metadata.

    Raises ConfigError if another `deepspeed`, or a module that checks for it, was imported already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(str(FOLDER)):
        raise ConfigError(
            f"[deepspeed::install] another deepspeed was imported already "
            f"({getattr(loaded, '__file__', None)}). Call install() before anything imports it"
        )
    early = [one for one in _DECIDE if one in sys.modules]
    if early and not installed():
        raise ConfigError(
            f"[deepspeed::install] {early[0]} was already imported and did not find a "
            f"deepspeed. Call install() (or import penstock.hf or penstock.lightning) before you "
            f"import {early[0]}"
        )
    if not installed():
        sys.path.insert(0, str(FOLDER))
        importlib.invalidate_caches()


def uninstall() -> None:
    """Undoes install() for later imports."""
    while str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))
    importlib.invalidate_caches()
