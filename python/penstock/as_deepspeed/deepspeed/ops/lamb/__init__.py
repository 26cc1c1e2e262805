"""LAMB, which is not supported, since it is not elementwise."""

from ... import _missing_name

FusedLamb = _missing_name.cls(
    "deepspeed.ops.lamb.FusedLamb", "its trust ratio needs whole parameters; use AdamW or Lion"
)
