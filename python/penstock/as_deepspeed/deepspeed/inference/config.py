"""Inference engines, which are not built."""

from .. import _missing_name

DeepSpeedInferenceConfig = _missing_name.cls("deepspeed.DeepSpeedInferenceConfig", "it trains")
