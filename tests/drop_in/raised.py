"""Helper: the error of a call, as a text."""

from collections.abc import Callable
from typing import Any


def raised(call: Callable[..., Any], *args: Any) -> str:
    """Returns "Type: message" of what call(*args) raises; "" if it raises nothing."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {error}"
    return ""
