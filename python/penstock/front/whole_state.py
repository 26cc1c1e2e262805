"""State of optimizers on whole parameters in checkpoints: of any shape and kind, on one rank."""

from __future__ import annotations

import io
from typing import Any

import torch

from penstock._native import ConfigError

_PACKED = "packed."  # prefix of the key of a state that is neither a tensor nor a number


def is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def packed_key(key: Any) -> str:
    return f"{_PACKED}{key}"


def is_packed(key: str) -> bool:
    return key.startswith(_PACKED)


def packed(value: Any, what: str) -> torch.Tensor:
    """Returns a state of lists, dicts, numbers and tensors as bytes (uint8).

    Raises ConfigError if it has anything else.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        made = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        _unpacked(made)
    except Exception as error:
        raise ConfigError(
            f"[front::save] {what} (a {type(value).__name__}) has something besides lists, tuples, "
            f"dicts, numbers, texts and tensors, which a checkpoint cannot hold"
        ) from error
    return made


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a loaded state with its packed values unpacked, on the device of the bytes."""
    return {
        key.removeprefix(_PACKED): _unpacked(value) if is_packed(key) else value
        for key, value in state.items()
    }


def _unpacked(values: torch.Tensor) -> Any:
    held = io.BytesIO(values.cpu().numpy().tobytes())
    return torch.load(held, map_location=values.device, weights_only=True)
