"""The config of inference engines, which are not supported."""

from .. import _missing_name

DeepSpeedInferenceConfig = _missing_name.cls("deepspeed.DeepSpeedInferenceConfig", "it only trains")
