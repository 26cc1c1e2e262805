"""What initialize() is given as a config: a dict, text or a file, in our dialect or DeepSpeed's."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from penstock import ranks
from penstock._native import ConfigError, _penstock

ConfigLike = Mapping[str, Any] | str | os.PathLike[str] | None


def config_dict(config: ConfigLike) -> dict[str, Any]:
    """The config in our own dialect.

    DeepSpeed's (docs/deepspeed.md) is translated; one warning on rank 0 lists what of it has no
    effect.

    Args:
        config: a dict, JSON text, a path, or DeepSpeed's base64 of JSON text.

    Raises:
        ConfigError: it is none of these; a key of DeepSpeed's that is not supported.
    """
    text = _text_of(config)
    if _penstock.is_deepspeed_config(text):
        translated = _penstock.translate_deepspeed_config(text, _world())
        if translated.warning and ranks.rank() == 0 and os.environ.get("RANK", "0") == "0":
            warnings.warn(f"[front::initialize] {translated.warning}", UserWarning, stacklevel=3)
        native: dict[str, Any] = json.loads(translated.native)
        return native
    if isinstance(config, Mapping):
        return dict(config)
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"[front::initialize] config is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError("[front::initialize] config must be a JSON object")
    return parsed


def _world() -> int:
    return ranks.world() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _text_of(config: ConfigLike) -> str:
    if config is None:
        return "{}"
    if isinstance(config, Mapping):
        return json.dumps(_finite(config))
    text = os.fspath(config)
    if text.lstrip().startswith("{"):
        return text
    path = pathlib.Path(text)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    with contextlib.suppress(binascii.Error, UnicodeError):
        decoded = base64.urlsafe_b64decode(text.encode()).decode()
        if decoded.lstrip().startswith("{"):
            return decoded
    raise ConfigError(
        f'[front::initialize] config "{text}" is neither JSON text nor a readable file'
    )


def _finite(value: Any) -> Any:
    """Without numbers that JSON has no form for: frameworks write `"steps_per_print": inf`."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
