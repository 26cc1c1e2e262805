"""Inference engines, which are not supported: Penstock only trains."""
