"""Lends the simulated device the name "cuda", for scripts and frameworks that know no other.

In the context, torch functions that get the device "cuda" use "sim" instead, and torch.cuda answers
for it; so does "simccl" for NCCL. Tensors still say that they are on "sim". To run a script in it:

    penstock run --as-deepspeed --nproc 2 tests/device/lent_cuda.py SCRIPT ARGUMENTS

With PENSTOCK_SIM_NAME=sim the script runs outside the context, on a machine with the device "sim".
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sim
import torch
from torch.overrides import TorchFunctionMode


def _here(value: Any) -> Any:
    """The simulated device in the place of a GPU; other values as they are."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("sim", value.index)
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "sim" + value.removeprefix("cuda")
    return value


class _Names(TorchFunctionMode):
    """Replaces the device in the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # scripts compare its type
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            device, func = kwargs.pop("device", None) if kwargs else None, torch.Tensor.to
            args = (args[0], device or (args[1] if len(args) > 1 else None) or "sim")
        named = {key: _here(value) for key, value in (kwargs or {}).items()}
        return func(*map(_here, args), **named)


def _index(device: Any = None) -> Any:
    found = _here(device)
    found = found.index if isinstance(found, torch.device) else found
    return torch.device(found).index if isinstance(found, str) else found


def _numbered(call: Any) -> Any:
    return lambda device=None: call(_index(device))


def _module() -> dict[str, Any]:
    """What torch.cuda answers."""
    own, every = torch.get_device_module("sim"), torch.accelerator
    properties = types.SimpleNamespace(
        name="simulated", total_memory=every.get_memory_info(0)[1], major=9, minor=0
    )
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: every.get_memory_info(_index(device)),
        "set_device": lambda device: own.set_device(_index(device)),
        "get_rng_state": lambda device="cuda": own.get_rng_state(_here(device)),
        "set_rng_state": lambda state, device="cuda": own.set_rng_state(state, _here(device)),
        "default_generators": own.default_generators,
        "_lazy_call": lambda call, **_: call(),
        "_lazy_init": lambda: None,
        "reset_peak_memory_stats": lambda device=None: every.reset_peak_memory_stats(),
        "ipc_collect": lambda: None,
    }
    for name in ("device_count", "current_device", "manual_seed", "manual_seed_all", "empty_cache"):
        found[name] = getattr(own, name)
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "memory_reserved",
                 "max_memory_reserved", "memory_stats"):  # fmt: skip
        found[name] = _numbered(getattr(every, name))
    return found


_init_group = torch.distributed.init_process_group


def _group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Makes a group for tensors of the device alone where a script asks for NCCL's."""
    _init_group("simccl" if backend == "nccl" else backend, *args, **kwargs)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """In this context, "cuda" is the simulated device."""
    group = mock.patch.object(torch.distributed, "init_process_group", _group)
    with _Names(), group, mock.patch.multiple(torch.cuda, **_module()):
        yield


def main() -> None:
    sim.start()
    script = next(one for one in sys.argv[1:] if one.endswith(".py"))  # behind --local_rank
    sys.argv.remove(script)
    sys.argv[0] = script
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    own_name = os.environ.get("PENSTOCK_SIM_NAME") == "sim"
    with contextlib.nullcontext() if own_name else lent():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
