"""Reads an mpu, whose methods have different names in different versions of Megatron-LM."""

from __future__ import annotations

from typing import Any

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _said(mpu: Any, kinds: tuple[str, ...], what: str, otherwise: Any) -> Any:
    """Calls the first of these methods that the mpu has. Returns `otherwise` if it has none."""
    for kind in kinds:
        call = getattr(mpu, f"get_{kind}_{what}", None)
        if callable(call):
            return call()
    return otherwise


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Returns this rank's index among the tensor ranks of the mpu; 0 without an mpu."""
    return int(_said(mpu, _TENSOR, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Returns the number of tensor ranks of the mpu; 1 without an mpu."""
    return int(_said(mpu, _TENSOR, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Returns the process group of the mpu's tensor ranks; None without an mpu."""
    return _said(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Returns the number of stages of the mpu; 1 without an mpu."""
    return int(_said(mpu, _PIPELINE, "world_size", 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Returns the process group of the mpu's stages; None without an mpu."""
    return _said(mpu, _PIPELINE, "group", None)
