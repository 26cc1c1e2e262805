"""Inference engines, which are not built."""

from .. import _missing_name

InferenceEngine = _missing_name.cls("deepspeed.InferenceEngine", "it trains")
