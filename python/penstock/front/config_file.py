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

from penstock._native import ConfigError, _penstock
from penstock.front import process_group

ConfigLike = Mapping[str, Any] | str | os.PathLike[str] | None


def config_dict(config: ConfigLike) -> dict[str, Any]:
    """The config in our own dialect; without a scheduler, which is not part of it."""
    return read(config)[0]


def read(config: ConfigLike) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The config in our own dialect, the `scheduler` section of DeepSpeed's (JSON, or ""), and all
    of DeepSpeed's as it was given ({} where it is ours).

    DeepSpeed's (docs/deepspeed.md) is translated; one warning on rank 0 lists what of it has no
    effect.

    Args:
        config: a dict, JSON text, a path, or DeepSpeed's base64 of JSON text.

    Raises:
        ConfigError: it is none of these; a key of DeepSpeed's that is not supported.
    """
    text = text_of(config)
    if _penstock.is_deepspeed_config(text):
        native, translated = translate(text)
        asked = [one.key for one in translated.given if one.fate == "taken"]
        if any(one.startswith("tensor_parallel.partition_config.") for one in asked):
            raise ConfigError(
                '[front::initialize] "tensor_parallel.partition_config" is read by '
                'deepspeed.initialize(): say it with "parallel.rules" in the section '
                '"penstock"'
            )
        if translated.warning and process_group.rank() == 0 and os.environ.get("RANK", "0") == "0":
            warnings.warn(f"[front::initialize] {translated.warning}", UserWarning, stacklevel=3)
        return native, str(translated.scheduler), json.loads(_penstock.plain_json(text))
    if isinstance(config, Mapping):
        return dict(config), "", {}
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"[front::initialize] config is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError("[front::initialize] config must be a JSON object")
    return parsed, "", {}


def translate(text: str, num_ranks: int = 0) -> tuple[dict[str, Any], Any]:
    """DeepSpeed's config (JSON) in our own dialect, and what the translator said of each key.

    Its section "penstock" has keys of our own, which replace what was translated.
    """
    given: dict[str, Any] = json.loads(_penstock.plain_json(text))
    own = given.pop("penstock", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError('[front::initialize] "penstock" is no JSON object')
    translated = _penstock.translate_deepspeed_config(json.dumps(given), num_ranks or world())
    native: dict[str, Any] = json.loads(translated.native)
    for key, value in own.items():
        both = isinstance(value, Mapping) and isinstance(native.get(key), Mapping)
        native[key] = {**native[key], **value} if both else value
    return native, translated


def world() -> int:
    """Number of ranks, also where only the launcher's environment says it."""
    if process_group.is_initialized():
        return process_group.world()
    return int(os.environ.get("WORLD_SIZE", "1"))


def text_of(config: ConfigLike) -> str:
    """The JSON text of what `read()` takes, with numbers that JSON has.

    Raises ConfigError: no JSON and no file; a key that is there twice.
    """
    text = _given_text(config)
    try:
        return json.dumps(finite(json.loads(text, object_pairs_hook=_once)))
    except json.JSONDecodeError:  # it may have comments, which the parser of DeepSpeed's takes
        return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f'[front::initialize] the key "{twice}" is in the config twice')
    return made


def _given_text(config: ConfigLike) -> str:
    if config is None:
        return "{}"
    if isinstance(config, Mapping):
        return json.dumps(finite(config))
    text = os.fspath(config)
    if text.lstrip().startswith("{"):
        return text
    path = pathlib.Path(text)
    with contextlib.suppress(OSError):  # a name that is too long: base64
        if path.is_file():
            return path.read_text(encoding="utf-8")
    with contextlib.suppress(binascii.Error, UnicodeError):
        decoded = base64.urlsafe_b64decode(text.encode()).decode()
        if decoded.lstrip().startswith("{"):
            return decoded
    raise ConfigError(
        f'[front::initialize] config "{text}" is neither JSON text nor a readable file'
    )


def finite(value: Any) -> Any:
    """Without numbers that JSON has no form for: frameworks write `"steps_per_print": inf`."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
