"""Inference engines, which are not built."""

from .. import _absent

InferenceEngine = _absent.cls("deepspeed.InferenceEngine", "it trains")
