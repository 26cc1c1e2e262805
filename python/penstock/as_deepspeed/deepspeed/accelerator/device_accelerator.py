"""DeepSpeed's accelerator calls for every accelerator that torch supports.

The table below names torch's function for each call: in torch.accelerator, which serves all
devices, or in the device's own module, such as torch.cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .abstract_accelerator import SHARED, VALUES, Calls, DeepSpeedAccelerator, always, unsupported

# Kind -> the environment variable that selects devices, where it is not KIND_VISIBLE_DEVICES.
_VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def _of_all(name: str) -> Callable[..., Any]:
    """Returns a call of torch.accelerator, whose only argument is the number of a device."""
    return lambda self, device_index=None: getattr(torch.accelerator, name)(device_index)


def _memory_info(at: int) -> Callable[..., Any]:
    return lambda self, device_index=None: torch.accelerator.get_memory_info(device_index)[at]


def _of_module(path: str, *otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of the device's module. If the module lacks the function, the call runs
    `otherwise`, or raises ConfigError."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            found = otherwise[0] if otherwise else unsupported(path, self._name)
        return found(*args, **kwargs)

    return call


def _name_of(self: Any, device_index: int | None = None) -> str:
    return self._name if device_index is None else f"{self._name}:{device_index}"


def _get_rng_state(self: Any, device_index: int | None = None) -> torch.Tensor:
    state: torch.Tensor = self._module.get_rng_state(torch.device(_name_of(self, device_index)))
    return state


def _set_rng_state(self: Any, new_state: torch.Tensor, device_index: int | None = None) -> None:
    self._module.set_rng_state(new_state, torch.device(_name_of(self, device_index)))


def _is_fp16_supported(self: Any) -> bool:
    major = _capability(self)
    return major is None or major >= 7


def _capability(self: Any) -> int | None:
    """Returns the first number of CUDA's compute capability; None for other devices."""
    found = self._module.get_device_capability() if self._name == "cuda" else None
    return None if found is None or torch.version.hip else int(found[0])


def _dtypes(self: Any) -> list[torch.dtype]:
    found = [torch.float32]
    if self.is_fp16_supported():
        found.append(torch.float16)
    if self.is_bf16_supported():
        found.append(torch.bfloat16)
    return found


def _value(path: str) -> Callable[..., Any]:
    """Returns an attribute of the device's module or, if it has none, torch's own attribute."""
    return lambda self: getattr(self._module, path, None) or getattr(torch, path)


_FALSE = (
    "is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure"
).split()
# DeepSpeed's name -> the function of torch.accelerator, which takes a device's number.
_NUMBERED = {
    "synchronize": "synchronize",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_cached": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
# Functions that have the same name in the device's own module.
_OWN = (
    "set_device manual_seed manual_seed_all initial_seed stream current_stream default_stream"
).split()
_DEVICE: Calls = {
    **{name: _of_all(own) for name, own in _NUMBERED.items()},
    **{name: _of_module(name) for name in _OWN},
    "device_name": _name_of,
    "current_device_name": lambda self: _name_of(self, torch.accelerator.current_device_index()),
    "device": lambda self, device_index=None: torch.device(_name_of(self, device_index)),
    "current_device": lambda self: torch.accelerator.current_device_index(),
    "device_count": lambda self: torch.accelerator.device_count(),
    "is_available": lambda self: torch.accelerator.is_available(),
    "communication_backend_version": _of_module("nccl.version"),
    # Random numbers
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "default_generator": lambda self, device_index: self._module.default_generators[device_index],
    # Streams and graphs
    "is_current_stream_capturing": _of_module("is_current_stream_capturing", always(False)),
    "create_graph": _of_module("CUDAGraph"),
    "capture_to_graph": _of_module("graph"),
    "replay_graph": lambda self, graph: graph.replay(),
    # Memory
    "empty_cache": lambda self: torch.accelerator.empty_cache(),
    "total_memory": _memory_info(1),
    "available_memory": _memory_info(0),
    # Data types
    "is_bf16_supported": _of_module("is_bf16_supported", always(True)),
    "is_fp16_supported": _is_fp16_supported,
    "supported_dtypes": _dtypes,
    "preferred_dtype": lambda self: _dtypes(self)[-1],
    "is_triton_supported": lambda self: (_capability(self) or 0) >= 8,
    # Others
    "range_push": _of_module("nvtx.range_push", always(None)),
    "range_pop": _of_module("nvtx.range_pop", always(None)),
    "lazy_call": _of_module("_lazy_call", lambda callback: callback()),
    "export_envs": lambda self: [self._communication_backend_name.upper()],
    "visible_devices_envs": lambda self: [
        _VISIBLE.get(self._name, f"{self._name.upper()}_VISIBLE_DEVICES")
    ],
    **dict.fromkeys(_FALSE, always(False)),
}


class DeviceAccelerator(DeepSpeedAccelerator):
    """The devices of one kind.

    Args:
        kind: the type of torch.device: "cuda", "xpu", or another one that torch.accelerator names.
    """

    _CALLS: ClassVar[Calls] = {**SHARED, **_DEVICE}
    _VALUES: ClassVar[Calls] = {**VALUES, "Stream": _value("Stream"), "Event": _value("Event")}

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module = torch.get_device_module(kind)
        backends = dist.Backend.default_device_backend_map
        self._communication_backend_name = backends.get(kind, "gloo")


class CUDA_Accelerator(DeviceAccelerator):  # noqa: N801 - DeepSpeed's name
    """The GPUs of CUDA or ROCm."""

    def __init__(self) -> None:
        super().__init__("cuda")
