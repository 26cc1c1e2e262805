"""Reads the config of initialize(): a dict, text or a file, with Penstock's or DeepSpeed's keys."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import numbers
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from penstock._native import ConfigError, _penstock
from penstock.front import process_group

ConfigLike = Mapping[str, Any] | str | os.PathLike[str] | None
_LONGEST_PATH = 4096


def config_dict(config: ConfigLike) -> dict[str, Any]:
    """Returns the config with Penstock's keys. DeepSpeed's `scheduler` section is left out."""
    return read(config)[0]


def read(config: ConfigLike) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Reads a config and translates it if it has DeepSpeed's keys (docs/deepspeed.md).

    One warning on rank 0 lists the DeepSpeed keys that have no effect.

    Args:
        config: a dict, JSON text, a path, or DeepSpeed's base64 of JSON text.

    Returns:
        The config with Penstock's keys, DeepSpeed's `scheduler` section (JSON, or ""), and the
        DeepSpeed config as DeepSpeed reads it ({} if the config has Penstock's keys).

    Raises:
        ConfigError: if `config` is none of these, or has a DeepSpeed key that is not supported.
    """
    text = text_of(config)
    if _penstock.is_deepspeed_config(text):
        native, translated = translate(text)
        asked = [one.key for one in translated.given if one.fate == "taken"]
        if any(one.startswith("tensor_parallel.partition_config.") for one in asked):
            raise ConfigError(
                "[front::initialize] only deepspeed.initialize() reads "
                '"tensor_parallel.partition_config". Use "parallel.rules" in the section '
                '"penstock" instead'
            )
        if "data_types.buffer_dtype" in asked:
            raise ConfigError(
                '[front::initialize] only deepspeed.initialize() reads "data_types.buffer_dtype". '
                'Use a rule with the names of the buffers in "dtypes" in the section "penstock" '
                "instead"
            )
        values = json.loads(translated.values)
        if values.get("gradient_allreduce_op") == "sum":
            raise ConfigError(
                '[front::initialize] only deepspeed.initialize() reads "gradient_allreduce_op". '
                "Multiply each loss by the number of data ranks instead"
            )
        if not values.get("managed_gradient_accumulation", True):
            raise ConfigError(
                "[front::initialize] only deepspeed.initialize() reads "
                '"managed_gradient_accumulation". Call engine.step(force=True) instead'
            )
        if translated.warning and process_group.rank() == 0 and os.environ.get("RANK", "0") == "0":
            warnings.warn(f"[front::initialize] {translated.warning}", UserWarning, stacklevel=3)
        return native, str(translated.scheduler), values
    if isinstance(config, Mapping):
        return dict(config), "", {}
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"[front::initialize] {_named(config)} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"[front::initialize] {_named(config)} must be a JSON object")
    return parsed, "", {}


def translate(text: str, num_ranks: int = 0) -> tuple[dict[str, Any], Any]:
    """Translates a DeepSpeed config (JSON) to Penstock's keys.

    Keys of its section "penstock" replace the translated keys.

    Args:
        text: JSON of the DeepSpeed config; it may have comments.
        num_ranks: number of ranks; default: `world()`.

    Returns:
        The config with Penstock's keys, and the translator's report of each key.

    Raises:
        ConfigError: if "penstock" is not an object, or a key is not supported.
    """
    given: dict[str, Any] = json.loads(_penstock.plain_json(text))
    own = given.pop("penstock", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError('[front::initialize] "penstock" is not a JSON object')
    translated = _penstock.translate_deepspeed_config(json.dumps(given), num_ranks or world())
    native: dict[str, Any] = json.loads(translated.native)
    for key, value in own.items():
        both = isinstance(value, Mapping) and isinstance(native.get(key), Mapping)
        native[key] = {**native[key], **value} if both else value
    return native, translated


def world() -> int:
    """Returns the number of ranks. Before torch's process group exists, reads WORLD_SIZE."""
    if process_group.is_initialized():
        return process_group.world()
    return int(os.environ.get("WORLD_SIZE", "1"))


def text_of(config: ConfigLike) -> str:
    """Returns the JSON text of a config that `read()` accepts. Infinities and NaN become strings.

    Raises ConfigError if `config` is neither JSON nor a readable file, or has a key twice.
    """
    text = _given_text(config)
    if "\0" in text:
        raise ConfigError(
            f"[front::initialize] {_named(config)} is not JSON: it has a NUL character"
        )
    try:
        return json.dumps(finite(json.loads(text, object_pairs_hook=once)))
    except json.JSONDecodeError:  # perhaps comments, which the DeepSpeed translator accepts
        return text
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of 4301 digits
        raise ConfigError(f"[front::initialize] {_named(config)} is not valid: {error}") from error


def _named(config: ConfigLike) -> str:
    """Returns "config" with the file's name, for errors."""
    given = "" if config is None or isinstance(config, Mapping) else os.fspath(config)
    is_text = given.lstrip().startswith("{")
    return f'config "{given}"' if given and not is_text and len(given) < _LONGEST_PATH else "config"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict. Raises ConfigError if a key occurs twice."""
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
    with contextlib.suppress(OSError):  # the name is too long for a file: it may be base64
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8-sig")  # editors may write a BOM
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f'[front::initialize] config "{text}" is not UTF-8 text: {error}. Save it as '
                    f"UTF-8"
                ) from error
    with contextlib.suppress(binascii.Error, UnicodeError):
        decoded = base64.urlsafe_b64decode(text.encode()).decode()
        if decoded.lstrip().startswith("{"):
            return decoded
    raise ConfigError(
        f'[front::initialize] config "{text}" is neither JSON text nor a readable file'
    )


def finite(value: Any, key: str = "config") -> Any:
    """Returns the value with infinities, NaN, paths and dtypes as strings: JSON does not have
    these.

    Frameworks write `"steps_per_print": inf`. Raises ConfigError for a value that JSON lacks.
    """
    if isinstance(value, Mapping):
        return {str(name): finite(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, key) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, numbers.Real):  # numpy's numbers
        return int(value) if isinstance(value, numbers.Integral) else finite(float(value))
    if type(value).__name__ == "dtype":  # torch's dtypes
        return str(value)
    raise ConfigError(
        f'[front::initialize] "{key}" is a {type(value).__name__}, which JSON cannot express. '
        f"Pass a number, a string, a list or a dict"
    )
