"""Counts the FLOPs of a model's forward from its operators; knows the peak FLOP/s of devices."""

from __future__ import annotations

import collections
import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.front import module_tree

aten = torch.ops.aten
Shape = tuple[int, ...]

# Dense peaks in FLOP/s from the vendors' data sheets: part of device name -> precision -> peak.
PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12, "fp32": 163e12},
    "MI250X": {"bf16": 383e12, "fp16": 383e12, "fp32": 47.9e12},
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _matmul(args: Any, out: Any) -> int:
    """Returns the FLOPs of [..., n, k] x [..., k, m]. The last two tensors are the factors."""
    factors = [one for one in args if torch.is_tensor(one)][-2:]
    return 2 * int(factors[0].numel()) * int(factors[1].shape[-1])


def _conv(args: Any, out: Any) -> int:
    """Each output position (if transposed: each input position) sums over one window."""
    given, weight, transposed = args[0], args[1], args[6]
    places = given if transposed else out
    return 2 * int(places.numel()) * int(weight[0].numel())


def _attention(args: Any, out: Any) -> int:
    """Counts scores and score-value products over all pairs of tokens, masked ones included."""
    query, key, value = args[:3]
    pairs = math.prod(query.shape[:-1]) * int(key.shape[-2])
    return int(2 * pairs * (int(query.shape[-1]) + int(value.shape[-1])))


_RULES: dict[Any, Callable[[Any, Any], int]] = {
    aten.mm: _matmul,
    aten.addmm: _matmul,
    aten.bmm: _matmul,
    aten.baddbmm: _matmul,
    aten._scaled_mm: lambda args, out: 2 * args[0].numel() * int(args[1].shape[-1]),
    aten.convolution: _conv,
    aten._convolution: _conv,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
}


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matrix products, convolutions and attention inside its context.

    A multiply-add is two FLOPs. Elementwise operators are not counted, as in the literature.

    Attributes:
        by_unit: FLOPs by the value that `unit()` returns when the operator runs. The key is 0 if
            no `unit` was given.
    """

    def __init__(self, unit: Callable[[], int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = unit or (lambda: 0)
        self.by_unit: collections.Counter[int] = collections.Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch excludes the mode from compiled code. If it does, torch's compiler is
        imported."""
        return False

    @property
    def total(self) -> int:
        return self.by_unit.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = _RULES.get(func._overloadpacket)
        if rule is not None:
            first = out[0] if isinstance(out, (tuple, list)) else out
            self.by_unit[self._unit()] += rule(args, first)
        return out


class _Excluded(Counter):  # type: ignore[no-untyped-call]
    """A Counter that torch's compiler does not trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def counter(unit: Callable[[], int] | None = None) -> Counter:
    """Returns a Counter that imports torch's compiler (66 MiB) only if the process has it already.

    Without the compiler there is no compiled code, so the counter need not be excluded from any.
    """
    return _Excluded(unit) if "torch._dynamo" in sys.modules else Counter(unit)


def hidden(module: torch.nn.Module) -> bool:
    """Whether parts of the module are compiled. A Counter cannot see operators in compiled code."""
    return any(
        type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None
        for _, one in module_tree.modules_of(module)
    )


def peak(device: torch.device, precision: str) -> float:
    """Returns the device's peak FLOP/s: from PEAKS, or measured on the CPU. 0 if unknown."""
    if device.type != "cpu":
        if not hasattr(torch, device.type) or not hasattr(
            getattr(torch, device.type), "get_device_name"
        ):
            return 0.0
        name = str(getattr(torch, device.type).get_device_name(device))
        names = (part for part in PEAKS if re.search(rf"\b{part}\b", name))
        return PEAKS.get(next(names, ""), {}).get(precision, 0.0)
    # CPUs multiply fp16 slowly, so a measured value would not be a useful peak.
    return 0.0 if precision == "fp16" else measured(_DTYPES.get(precision, torch.float32))


def measured(dtype: torch.dtype, size: int = 1024, seconds: float = 0.1) -> float:
    """Measures the FLOP/s of a [size, size] matrix product on the CPU with torch's threads."""
    with torch.no_grad():
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype)
        torch.mm(left, right, out=out)
        takes: list[float] = []
        while sum(takes) < seconds:
            begin = time.perf_counter()
            torch.mm(left, right, out=out)
            takes.append(time.perf_counter() - begin)
    return 2.0 * size**3 / min(takes)
