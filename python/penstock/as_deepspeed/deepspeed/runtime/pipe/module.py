"""Pipelines, which are not built yet: the classes raise where they are made."""

import torch

from ... import _absent

_LATER = "pipelines are not built yet"
PipelineModule = _absent.cls("deepspeed.pipe.PipelineModule", _LATER, (torch.nn.Module,))
LayerSpec = _absent.cls("deepspeed.pipe.LayerSpec", _LATER)
TiedLayerSpec = _absent.cls("deepspeed.pipe.TiedLayerSpec", _LATER)
