"""Functions that depend on torch's version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from penstock import ConfigError


def _numbers(version: object) -> tuple[int, ...]:
    """Returns the release numbers of a version, without zeros at the end."""
    release = re.match(r"\d+(\.\d+)*", str(version))
    if release is None:
        raise ConfigError(
            f"[deepspeed::required_torch_version] {version!r} is not a version such as 2.1"
        )
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", release[0]).split("."))


def required_torch_version(min_version: object = None, max_version: object = None) -> bool:
    """Whether torch's release is in the range, bounds included."""
    if not min_version and not max_version:
        raise ConfigError(
            "[deepspeed::required_torch_version] neither min_version nor max_version is given: "
            "pass one or both"
        )
    has = _numbers(torch.__version__)
    return (not min_version or _numbers(min_version) <= has) and (
        not max_version or has <= _numbers(max_version)
    )


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Calls the hook after each gradient is added to `param.grad`."""
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself: compile blocks of the model before initialize()."""
    return fn
