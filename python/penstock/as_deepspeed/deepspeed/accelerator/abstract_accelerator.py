"""What all accelerators have in common: a table of calls, and the class that looks them up."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

import torch

from penstock import ConfigError

Calls = Mapping[str, Callable[..., Any]]


def always(value: Any) -> Callable[..., Any]:
    """Returns a call that returns the value."""
    return lambda *_, **__: value


def _tensor_type(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda self: functools.partial(torch.tensor, dtype=dtype, device=self._name)


def _pin_empty(_self: Any, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
    """Returns new pinned host memory of this shape, without values."""
    if torch.device(device).type != "cpu":
        raise ValueError(f"[deepspeed::pin_empty] device is {device!r}; allowed: 'cpu'")
    shape = size[0] if len(size) == 1 and isinstance(size[0], tuple | list) else size
    return torch.empty(shape, dtype=dtype, pin_memory=_self._pins)


def _pin_memory(
    self: Any, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
) -> torch.Tensor:
    """Returns pinned host memory with the tensor's values, or without values if `make_copy` is
    False."""
    if make_copy:
        return tensor.pin_memory() if self._pins else tensor
    shape = tuple(tensor.shape) if match_shape else (tensor.numel(),)
    return _pin_empty(self, shape, dtype=tensor.dtype)


def _pin_like(
    self: Any, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _pin_empty(self, tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device)


def _builder(_self: Any, class_name: str) -> Any:
    """Returns the class in op_builder with this name, or None if there is none."""
    return getattr(importlib.import_module("deepspeed.ops.op_builder"), class_name, None)


def _new_builder(self: Any, class_name: str) -> Any:
    kind = _builder(self, class_name)
    return None if kind is None else kind()


def _set_visible(self: Any, env: MutableMapping[str, str], numbers: Any) -> None:
    for name in self.visible_devices_envs():
        env[name] = ",".join(map(str, numbers))


def _set_compiler(self: Any, backend: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"[deepspeed::set_compile_backend] backend is {backend!r}; allowed: {known}"
        )
    self._compile_backend = backend


SHARED: Calls = {
    "communication_backend_name": lambda self: self._communication_backend_name,
    "on_accelerator": lambda self, tensor: tensor.device.type == self._name,
    "random": always(torch.random),
    "is_fp64_supported": always(True),
    "pin_memory": _pin_memory,
    "pin_empty": _pin_empty,
    "pin_empty_like": _pin_like,
    "pin_memory_alignment": always(1),
    "is_pinned": lambda self, tensor: tensor.is_pinned() if self._pins else True,
    "unpin_memory": always(None),
    "register_host_memory": always(False),
    "unregister_host_memory": always(None),
    "op_builder_dir": always("deepspeed.ops.op_builder"),
    "get_op_builder": _builder,
    "create_op_builder": _new_builder,
    "build_extension": lambda self: (
        importlib.import_module("torch.utils.cpp_extension").BuildExtension
    ),
    "set_visible_devices_envs": _set_visible,
    "get_compile_backend": lambda self: self._compile_backend,
    "set_compile_backend": _set_compiler,
    "prefer_triton_grouped_mm": always(False),
}  # fmt: skip
VALUES: Calls = {
    "BFloat16Tensor": _tensor_type(torch.bfloat16),
    "ByteTensor": _tensor_type(torch.uint8),
    "DoubleTensor": _tensor_type(torch.float64),
    "FloatTensor": _tensor_type(torch.float32),
    "HalfTensor": _tensor_type(torch.float16),
    "IntTensor": _tensor_type(torch.int32),
    "LongTensor": _tensor_type(torch.int64),
}


def unsupported(name: str, device: str) -> Callable[..., Any]:
    """Returns a call that raises ConfigError, because torch has no such call for the device."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f'[deepspeed::get_accelerator] {name} is not supported on "{device}": '
            f"torch.{device} has no such call"
        )

    return refuse


class DeepSpeedAccelerator:
    """An accelerator. Its attributes are looked up in two tables: one of calls, one of values."""

    _name = "cpu"  # kind of torch.device
    _communication_backend_name = "gloo"
    _compile_backend = "inductor"
    _pins = True  # whether host memory can be pinned
    _CALLS: ClassVar[Calls] = SHARED
    _VALUES: ClassVar[Calls] = VALUES

    def __getattr__(self, name: str) -> Any:
        if name in self._CALLS:
            return functools.partial(self._CALLS[name], self)
        if name in self._VALUES:
            return self._VALUES[name](self)
        raise AttributeError(f"deepspeed.accelerator: {name} is not supported by Penstock")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._CALLS, *self._VALUES})
