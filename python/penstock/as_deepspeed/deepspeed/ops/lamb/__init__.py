"""LAMB, which is not elementwise."""

from ... import _absent

FusedLamb = _absent.cls(
    "deepspeed.ops.lamb.FusedLamb", "its trust ratio needs whole parameters; use AdamW or Lion"
)
