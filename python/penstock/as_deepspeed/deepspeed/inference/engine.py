"""Inference engines, which are not supported."""

from .. import _missing_name

InferenceEngine = _missing_name.cls("deepspeed.InferenceEngine", "it only trains")
