"""Checkpoints of DeepSpeed's."""

from .. import _missing_name

DeepSpeedCheckpoint = _missing_name.cls(
    "deepspeed.checkpoint.DeepSpeedCheckpoint", "penstock convert reads checkpoints of DeepSpeed"
)
