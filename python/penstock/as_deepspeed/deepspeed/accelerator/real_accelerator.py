"""get_accelerator(): the machine's accelerator, or its CPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from penstock import ConfigError
from penstock.front import training_device

from .abstract_accelerator import DeepSpeedAccelerator
from .cpu_accelerator import CPU_Accelerator
from .device_accelerator import CUDA_Accelerator, DeviceAccelerator

_accelerator: Any = None


def _kind() -> str:
    """Returns the kind of device that DS_ACCELERATOR chooses, or that this machine has."""
    found = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    own = found.type if found else "cpu"
    wanted = os.environ.get("DS_ACCELERATOR") or own
    if wanted in ("cpu", own):
        return wanted
    has = f'has "{own}"' if found else "has no accelerator"
    raise ConfigError(
        f'[deepspeed::get_accelerator] DS_ACCELERATOR is "{wanted}", but this machine {has}. Unset '
        f'the variable, or set it to "{own}"' + (' or "cpu"' if found else "")
    )


def get_accelerator() -> Any:
    """Returns the accelerator on which engines train: the one that DS_ACCELERATOR names ("cpu" for
    the CPU), else the one that torch finds, else the CPU.

    Raises ConfigError if DS_ACCELERATOR names a device that this machine does not have.
    """
    global _accelerator
    if _accelerator is None:
        kind = _kind()
        made = {"cpu": CPU_Accelerator, "cuda": CUDA_Accelerator}.get(kind)
        _accelerator = DeviceAccelerator(kind) if made is None else made()
    return _accelerator


def set_accelerator(accelerator: Any) -> None:
    """Sets the object that get_accelerator() returns. Engines train on its device_name().

    Raises ConfigError if the object is neither None nor a DeepSpeedAccelerator.
    """
    global _accelerator
    if not isinstance(accelerator, DeepSpeedAccelerator | None):
        raise ConfigError(
            f"[deepspeed::set_accelerator] accelerator is a {type(accelerator).__name__}, not a "
            f"DeepSpeedAccelerator. Derive its class from "
            f"deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"
        )
    _accelerator = accelerator


def is_current_accelerator_supported() -> bool:
    return True


def rank_device(number: int | None = None) -> torch.device:
    """Returns the device on which this rank trains.

    Args:
        number: the device's index; default: the process's current device, or LOCAL_RANK (modulo
            the number of devices) if the current device is 0.

    Raises:
        ConfigError: if this machine has no such device.
    """
    kind = get_accelerator().device_name()
    wanted = kind if number is None or kind == "cpu" else f"{kind}:{number}"
    return training_device.resolved(wanted, "initialize")
