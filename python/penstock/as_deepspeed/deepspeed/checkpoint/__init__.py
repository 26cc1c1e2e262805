"""DeepSpeed's checkpoint classes, which are not supported."""

from .. import _missing_name

DeepSpeedCheckpoint = _missing_name.cls(
    "deepspeed.checkpoint.DeepSpeedCheckpoint", "`penstock convert` reads DeepSpeed's checkpoints"
)
