"""Converts Python values to JSON and back without loss: numbers, strings, lists, tuples, dicts."""

import collections
import math
from typing import Any

import torch

from penstock._native import ConfigError

_LARGEST = 2**63 - 1


def encode(value: Any, what: str) -> Any:
    """Returns the value in JSON types. A value without a JSON form becomes an object with one key
    that begins with "$".

    Raises:
        ConfigError: for a value that decode() could not restore (a tensor, a set, an object of a
            class). The error names the value's place in `what`.
    """
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"[front::save] {what} is not valid Unicode: {error}") from error
        return value
    if type(value) is int:
        return value if abs(value) <= _LARGEST else {"$int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is list:
        return [encode(item, f"{what}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{what}[{i}]") for i, item in enumerate(value)]}
    kind = type(value)
    if kind in _DICTS.values():
        mark = next(mark for mark, made in _DICTS.items() if made is kind)
        return {mark: encode(list(value.items()), what)}
    if kind is dict:
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        items = [
            (encode(key, f"a key of {what}"), encode(item, f"{what}[{key!r}]"))
            for key, item in value.items()
        ]
        return dict(items) if plain else {"$dict": [list(item) for item in items]}
    raise ConfigError(
        f"[front::save] {what} is a {kind.__module__}.{kind.__qualname__}. A checkpoint can hold "
        f"only numbers, strings, booleans, None, and lists, tuples and dicts of these"
    )


def encode_scalar(value: Any, what: str) -> Any:
    """Encodes a number, a string, or a tensor of one element with its dtype and shape."""
    if not isinstance(value, torch.Tensor):
        return encode(value, what)
    made = {"$tensor": encode(value.item(), what), "dtype": str(value.dtype).removeprefix("torch.")}
    return made | ({"shape": list(value.shape)} if value.dim() > 0 else {})


def decode_scalar(value: Any, device: torch.device | None = None) -> Any:
    """Restores the value that `encode_scalar` encoded. A tensor with dims goes to the device; one
    without dims stays on the CPU, and can be combined with tensors on any device."""
    if not isinstance(value, dict) or "$tensor" not in value:
        return decode(value)
    made = torch.tensor(decode(value["$tensor"]), dtype=getattr(torch, value["dtype"]))
    return made.reshape(value["shape"]).to(device) if "shape" in value else made


def decode(value: Any) -> Any:
    """Restores the value that `encode` encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    for mark, made in _MARKS.items():
        if len(value) == 1 and mark in value:
            return made(value[mark])
    return {key: decode(item) for key, item in value.items()}


_DICTS: dict[str, type] = {
    "$Counter": collections.Counter,
    "$OrderedDict": collections.OrderedDict,
}
_MARKS: dict[str, Any] = {
    "$int": int,
    "$float": float,
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$Counter": lambda items: collections.Counter(dict(decode(items))),
    "$OrderedDict": lambda items: collections.OrderedDict(decode(items)),
    "$dict": lambda items: {decode(key): decode(item) for key, item in items},
}
