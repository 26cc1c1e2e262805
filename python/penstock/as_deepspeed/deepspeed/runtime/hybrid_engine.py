"""Training and generating with one engine: every engine does, so there is no class of its own."""

from .. import _missing_name

DeepSpeedHybridEngine = _missing_name.cls(
    "deepspeed.DeepSpeedHybridEngine", "engine.module.generate() works under every strategy"
)
