"""DeepSpeed's names for functions of torch.compile."""

from collections.abc import Callable
from typing import Any

import torch


def is_compile_supported() -> bool:
    """Returns True: blocks of a model may be compiled before initialize()."""
    return True


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes the function from torch.compile."""
    left: Callable[..., Any] = torch.compiler.disable(func)  # type: ignore[no-untyped-call]
    return left
