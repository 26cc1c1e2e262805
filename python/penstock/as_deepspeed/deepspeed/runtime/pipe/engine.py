"""Pipelines, which are not built yet."""

from ... import _absent

PipelineEngine = _absent.cls("deepspeed.PipelineEngine", "pipelines are not built yet")
