"""The hybrid engine, which is not needed: every engine can train and generate."""

from .. import _missing_name

DeepSpeedHybridEngine = _missing_name.cls(
    "deepspeed.DeepSpeedHybridEngine", "engine.module.generate() works under every strategy"
)
