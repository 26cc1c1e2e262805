"""Checkpoints of DeepSpeed's."""

from .. import _absent

DeepSpeedCheckpoint = _absent.cls(
    "deepspeed.checkpoint.DeepSpeedCheckpoint", "penstock convert reads checkpoints of DeepSpeed"
)
