"""The host as an accelerator."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any, ClassVar

import torch

from .abstract_accelerator import SHARED, Calls, DeepSpeedAccelerator, always


def _resident(_self: Any, _index: Any = None) -> int:
    """Returns the resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak(_self: Any, _index: Any = None) -> int:
    """Returns the peak of this process's resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _stats(self: Any, _index: Any = None) -> dict[str, int]:
    current, peak = _resident(self), _peak(self)
    return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}


_TRUE = (
    "is_available is_synchronized_device use_host_timers is_bf16_supported is_fp16_supported "
    "resolves_data_dependency handles_memory_backpressure"
).split()
_NOTHING = (  # a CPU has no streams, events or caches
    "set_device synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated "
    "reset_max_memory_cached current_stream default_stream range_push range_pop Stream Event"
).split()
_HOST: Calls = {
    "device_name": always("cpu"),
    "current_device_name": always("cpu"),
    "device": always(contextlib.nullcontext()),
    "stream": always(contextlib.nullcontext()),
    "device_count": lambda self: int(
        os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1
    ),
    "current_device": lambda self: int(os.environ.get("LOCAL_RANK", "0")),
    "supported_dtypes": always([torch.float32, torch.bfloat16, torch.float16]),
    "preferred_dtype": always(torch.bfloat16),
    "initial_seed": lambda self: torch.initial_seed(),
    "default_generator": lambda self, index=None: torch.default_generator,
    "manual_seed": lambda self, seed: torch.manual_seed(seed),
    "manual_seed_all": lambda self, seed: torch.manual_seed(seed),
    "get_rng_state": lambda self, index=None: torch.get_rng_state(),
    "set_rng_state": lambda self, state, index=None: torch.set_rng_state(state),
    "lazy_call": lambda self, callback: callback(),
    "memory_allocated": _resident,
    "memory_cached": _resident,
    "memory_reserved": _resident,
    "max_memory_allocated": _peak,
    "max_memory_cached": _peak,
    "max_memory_reserved": _peak,
    "memory_stats": _stats,
    "total_memory": lambda self, index=None: (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
    "available_memory": lambda self, index=None: (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    ),
    "visible_devices_envs": always(["CUDA_VISIBLE_DEVICES"]),
    "export_envs": always([]),
    **dict.fromkeys(_TRUE, always(True)),
    **dict.fromkeys(("is_triton_supported", "is_current_stream_capturing"), always(False)),
    **dict.fromkeys(_NOTHING, always(None)),
}


class CPU_Accelerator(DeepSpeedAccelerator):  # noqa: N801 - DeepSpeed's name
    """The host as an accelerator. Calls that need a device do nothing, as in DeepSpeed.

    memory_allocated() returns the resident bytes of this process, and max_memory_allocated() their
    peak.
    """

    _pins = False
    _CALLS: ClassVar[Calls] = {**SHARED, **_HOST}
