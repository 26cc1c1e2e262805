"""Axes of ranks, for pipelines, which are not built yet."""

from ... import _absent

_LATER = "pipelines are not built yet"
ProcessTopology = _absent.cls("deepspeed.pipe.ProcessTopology", _LATER)
PipeModelDataParallelTopology = _absent.cls("PipeModelDataParallelTopology", _LATER)
PipeDataParallelTopology = _absent.cls("PipeDataParallelTopology", _LATER)
PipelineParallelGrid = _absent.cls("PipelineParallelGrid", _LATER)
