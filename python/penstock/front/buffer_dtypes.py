"""The dtypes of buffers in a model whose parameters have a low precision.

The engine computes with parameters in the dtype of `precision`. Buffers keep their dtype, because,
for example, a frequency table in bf16 would change the model. torch's own modules below accept no
mixture of dtypes, so their buffers take the dtype of their parameter, as in `model.bfloat16()`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

# Only modules with these forwards count. A class with its own forward may compute in other dtypes,
# for example in fp32.
_NORMS = {_BatchNorm.forward, _InstanceNorm.forward, SyncBatchNorm.forward}

# What torch's errors about operands of different dtypes have in common.
_MIXTURE = re.compile(r"dtype|scalar type|input type", re.IGNORECASE)


def followed(modules: Iterable[torch.nn.Module]) -> dict[int, torch.nn.Parameter]:
    """Returns the parameters whose dtype buffers must have, by the id of the buffer.

    These buffers are the running statistics of torch's batch norms and instance norms, and the
    vectors of both kinds of `spectral_norm`.
    """
    found: dict[int, torch.nn.Parameter] = {}
    for module in modules:
        for buffer, param in _pairs(module):
            if isinstance(buffer, torch.Tensor) and isinstance(param, torch.nn.Parameter):
                found[id(buffer)] = param
    return found


def _pairs(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    buffers, params = module._buffers, module._parameters
    if type(module).forward in _NORMS:
        yield buffers.get("running_mean"), params.get("weight")
        yield buffers.get("running_var"), params.get("weight")
    if isinstance(module, ParametrizationList):
        for part in module:
            if isinstance(part, _SpectralNorm):
                yield from ((one, params.get("original")) for one in part._buffers.values())
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            for name in (f"{hook.name}_u", f"{hook.name}_v"):
                yield buffers.get(name), params.get(f"{hook.name}_orig")


def explained(
    error: BaseException,
    params: Iterable[torch.Tensor],
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> str:
    """Returns an error text that names the buffers that may have caused an error about dtypes.

    These are the floating buffers in a dtype that no parameter has. Returns "" for other errors.
    """
    if not isinstance(error, RuntimeError) or not _MIXTURE.search(str(error)):
        return ""
    kinds = {param.dtype for param in params}
    low = next((kind for kind in _KEYS if kind in kinds), None)
    mixed = [
        name
        for name, value in buffers
        # A tensor without dims does not change the dtype of a result.
        if value.is_floating_point() and value.dtype not in kinds and value.dim() > 0
    ]
    if low is None or not mixed:
        return ""
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in mixed))
    rules = ", ".join(f'"{pattern}": "{_KEYS[low]}"' for pattern in patterns[:4])
    more = f" and {len(patterns) - 4} more" if len(patterns) > 4 else ""
    return (
        f"[front::forward] {error}\nThe parameters are {_KEYS[low]}, but some buffers have another "
        "dtype, and an operator may not accept both.\nFor the buffers that the forward combines "
        f'with parameters, add rules to the config, such as "dtypes": {{{rules}}}{more}, or cast '
        "these buffers where the forward reads them. Also cast floating inputs"
    )


def note_inputs(
    error: BaseException, params: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> None:
    """Adds a note to torch's error about dtypes: the dtype of the parameters, and what to cast."""
    kinds = list(dict.fromkeys(p.dtype for p in params if p.is_floating_point()))
    if not isinstance(error, RuntimeError) or not _MIXTURE.search(str(error)) or not kinds:
        return
    others = {one.dtype for one in inputs if one.is_floating_point() and one.dtype not in kinds}
    mixed = sorted(str(one).removeprefix("torch.") for one in others)
    found = f" Inputs of this forward are {' and '.join(mixed)}." if mixed else ""
    names = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
    note = (
        f"[front::forward] the parameters are {names}, and the engine does not cast inputs.{found}"
        f" Cast floating inputs and tensors that the forward makes, for example x.to({kinds[0]}), "
        f'or use torch.autocast with "precision": "fp32"'
    )
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


_KEYS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
