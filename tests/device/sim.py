"""The simulated accelerator, device "sim": a process calls start() first.

That loads the module from the build tree (`build/release/tests/device`, or the folder in the
environment variable PENSTOCK_SIM_BUILD), gives torch its name and Python side, and registers
the collectives backend "simccl". The switches and counters are those of simulated/control.h.
What it is for, what it finds, and its traps: README.md.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import pathlib
import types
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_BUILT = pathlib.Path(__file__).parents[2] / "build" / "release" / "tests" / "device"


def _load() -> types.ModuleType:
    folder = pathlib.Path(os.environ.get("PENSTOCK_SIM_BUILD", _BUILT))
    files = sorted(folder.glob("_sim.*.so"))
    if not files:
        raise ImportError(
            f"no _sim module in {folder}: build the target _sim, or set PENSTOCK_SIM_BUILD"
        )
    spec = importlib.util.spec_from_file_location("_sim", files[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_sim: Any = None
DEVICES = 8
_DEVICE_TYPE = 20  # c10::kPrivateUse1


@dataclass(frozen=True)
class Tally:
    """How often, and how many bytes in all."""

    count: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Counters:
    """Since the last reset; what each is stands in simulated/control.h."""

    kernels: int
    traffic: Tally
    traffic_by_name: dict[str, Tally]
    temporaries: Tally
    host_waits: int
    host_waits_by_name: dict[str, int]
    new_events: int
    h2d: Tally
    d2h: Tally
    d2d: Tally
    collectives: Tally
    collectives_by_name: dict[str, Tally]
    synchronous_operators: list[str]


def counters() -> Counters:
    """What the device has counted, in this process, since reset_counters()."""
    now = _sim.counters()
    for name in ("h2d", "d2h", "d2d", "collectives", "traffic", "temporaries"):
        now[name] = Tally(*now[name])
    for name in ("collectives_by_name", "traffic_by_name"):
        now[name] = {key: Tally(*pair) for key, pair in now[name].items()}
    return Counters(**now)


def reset_counters() -> None:
    """Counts from 0 again. Engines that were dropped before end first: they wait for the device."""
    gc.collect()
    _sim.reset_counters()


def set_seed(seed: int) -> None:
    """Restarts the drawing of delays on all streams."""
    _sim.set_seed(seed)


def set_delays_us(low: int, high: int) -> None:
    """The delay of a task is uniform(low, high) us times 0, 0, 1 or 8; high = 0: no delays."""
    _sim.set_delays_us(low, high)


def set_memory_limit(limit_bytes: int, device: int = -1) -> None:
    """What the allocator may reserve on a device, -1: on each."""
    _sim.set_memory_limit(limit_bytes, device)


def set_pinning_fails(fails: bool) -> None:
    """While set, pinning host memory raises."""
    _sim.set_pinning_fails(fails)


def set_issue_delay_us(high: int) -> None:
    """Before a thread issues a collective, it sleeps for uniform(0, high) us."""
    _sim.set_issue_delay_us(high)


def set_allocations_wait(wait: bool) -> None:
    """While set, the host waits for all devices where device or pinned memory is new."""
    _sim.set_allocations_wait(wait)


def set_pinned_offset(offset: int) -> None:
    """How many bytes after the beginning of a page new pinned memory begins."""
    _sim.set_pinned_offset(offset)


def pinned_bytes() -> int:
    """The bytes of pinned memory in use; each allocation counts as the next power of two."""
    count: int = _sim.pinned_bytes()
    return count


def set_pageable_copies_are_late(late: bool) -> None:
    """While set, copies of unpinned host memory do not wait if they are asked not to."""
    _sim.set_pageable_copies_are_late(late)


def write_wrongly(address: int) -> None:
    """Queues a kernel with a wrong index, which writes four bytes there."""
    _sim.write_wrongly(address)


def check_redzones(device: int = 0) -> None:
    """Waits for the device; raises if a redzone of a block in use was written."""
    _sim.check_redzones(device)


def contexts() -> list[int]:
    """The devices on which this process has a context."""
    contexts: list[int] = _sim.contexts()
    return contexts


def forget_contexts() -> None:
    """Counts contexts from none again."""
    _sim.forget_contexts()


def reset_errors() -> None:
    """Waits for the devices and forgets their asynchronous errors, which otherwise stay."""
    _sim.reset_errors()


def _index(device: Any) -> int:
    """0 to 7; "sim", "sim:3", 3, a torch.device, or None for the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return torch.accelerator.current_device_index() if device is None else int(device)


class _DeviceContext:
    """torch.sim.device(index)"""

    def __init__(self, device: Any):
        self.index = _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.set_device_index(self.before)


def _seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _sim.default_generator(index).manual_seed(seed)


def _device_module() -> types.ModuleType:
    """torch.sim: what torch and those who write for any accelerator ask of it."""

    def generator(device: Any) -> torch.Generator:
        return _sim.default_generator(_index(device))

    module = types.ModuleType("torch.sim")
    module.__dict__.update(
        _initialized=True,
        _lazy_init=lambda: None,
        _is_in_bad_fork=_sim.is_forked,
        is_available=lambda: not _sim.is_forked(),
        is_initialized=lambda: True,
        device=_DeviceContext,
        device_count=lambda: DEVICES,
        current_device=torch.accelerator.current_device_index,
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
        Stream=torch.Stream,
        Event=torch.Event,
        stream=lambda stream: stream,  # a torch.Stream is a context by itself
        current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
        default_stream=lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE
        ),
        set_stream=torch.accelerator.set_stream,
        manual_seed=lambda seed: generator(None).manual_seed(seed),
        manual_seed_all=_seed_all,
        get_rng_state=lambda device="sim": generator(device).get_state(),
        set_rng_state=lambda state, device="sim": generator(device).set_state(state),
        default_generators=tuple(_sim.default_generator(index) for index in range(DEVICES)),
        initial_seed=lambda: generator(None).initial_seed(),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        empty_cache=torch.accelerator.empty_cache,
        memory_allocated=lambda device=None: torch.accelerator.memory_allocated(_index(device)),
        max_memory_allocated=lambda device=None: torch.accelerator.max_memory_allocated(
            _index(device)
        ),
    )
    return module


def _collectives(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    def connect() -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    return _sim.make_collectives(rank, size, connect)


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _collectives, devices=["sim"])
    atexit.register(_sim.drain)


def start() -> None:
    """Makes torch of this process know the device; again: nothing. There is no way back, and much
    of torch behaves otherwise from then on: a process that runs other tests must not call this."""
    global _sim
    if _sim is None:
        _sim = _load()
        assert _sim.DEVICES == DEVICES
        _register()


def is_started() -> bool:
    """Whether this process called start()."""
    return _sim is not None
