"""get_accelerator() and the CPU accelerator."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import torch

from penstock import ConfigError

from .abstract_accelerator import DeepSpeedAccelerator


class CPU_Accelerator(DeepSpeedAccelerator):  # noqa: N801 - DeepSpeed's name
    """The host as an accelerator. Calls that need a device do nothing, as in DeepSpeed."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __getattr__(self, name: str) -> Any:
        found = _NUMBERS.get(name)
        if found is not None:
            return lambda *_, **__: found
        if name in _NOTHING:
            return lambda *_, **__: None
        if name.endswith("Tensor"):
            dtypes = {"BFloat16": torch.bfloat16, "Float": torch.float32, "Half": torch.float16}
            dtypes |= {"Double": torch.float64, "Int": torch.int32, "Long": torch.int64}
            dtypes |= {"Byte": torch.uint8}
            dtype = dtypes.get(name.removesuffix("Tensor"))
            if dtype is not None:
                return lambda data, **kwargs: torch.tensor(data, dtype=dtype, **kwargs)
        raise AttributeError(f"deepspeed.accelerator: {name} is not supported by Penstock")

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def preferred_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the resident bytes of this process; max_memory_allocated() returns their peak."""
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


_NUMBERS: dict[str, Any] = {
    "is_available": True,
    "is_synchronized_device": True,
    "use_host_timers": True,
    "resolves_data_dependency": True,
    "handles_memory_backpressure": True,
    "is_bf16_supported": True,
    "is_fp16_supported": True,
    "is_triton_supported": False,
    "is_pinned": True,
    "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
}
_NOTHING = {
    "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "current_stream", "default_stream",
    "range_push", "range_pop", "lazy_call", "Stream", "Event",
}  # fmt: skip

_accelerator: Any = None


def get_accelerator() -> Any:
    """Returns the accelerator. Raises ConfigError if DS_ACCELERATOR is not "cpu"."""
    global _accelerator
    if _accelerator is None:
        wanted = os.environ.get("DS_ACCELERATOR", "cpu")
        if wanted != "cpu":
            raise ConfigError(f"[deepspeed] DS_ACCELERATOR is {wanted}; allowed: cpu")
        _accelerator = CPU_Accelerator()
    return _accelerator


def set_accelerator(accelerator: Any) -> None:
    """Sets the object that get_accelerator() returns. The engine does not use it."""
    global _accelerator
    _accelerator = accelerator


def is_current_accelerator_supported() -> bool:
    return True
