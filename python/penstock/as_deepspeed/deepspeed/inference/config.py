"""Inference engines, which are not built."""

from .. import _absent

DeepSpeedInferenceConfig = _absent.cls("deepspeed.DeepSpeedInferenceConfig", "it trains")
