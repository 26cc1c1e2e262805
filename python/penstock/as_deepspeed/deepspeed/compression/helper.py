"""Functions that scripts use to replace layers of a model by hand."""

from __future__ import annotations

from typing import Any

import torch

from ..utils.module_utils import recursive_getattr as recursive_getattr
from ..utils.module_utils import recursive_setattr as recursive_setattr


def convert_conv1d_to_linear(model: torch.nn.Module, convert_type: type) -> torch.nn.Module:
    """Replaces each Conv1D of transformers by a Linear with the transposed weight, in place.

    Args:
        convert_type: the class of the layers to replace; their weights are [inputs, outputs].
    """
    model = getattr(model, "module", model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Module) and isinstance(layer, convert_type):
            recursive_setattr(model, name, _linear_of(layer))
    return model


def _linear_of(layer: Any) -> torch.nn.Linear:
    weight, bias = layer.weight, getattr(layer, "bias", None)
    inputs, outputs = weight.shape
    made = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = torch.nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
    made.register_parameter("bias", bias)
    return made
