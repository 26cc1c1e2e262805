"""Inference engines, which are not built: the engine trains."""
