"""engine.offload_states() and reload_states(): states in host memory between phases of a script.

On a CPU all states are in host memory, so nothing moves. On other devices the config decides where
states are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

from penstock import ConfigError

from ...utils.logging import logger

_enums: Any = importlib.import_module(__package__ + ".offload_config")
OffloadStateTypeEnum, _Device = _enums.OffloadStateTypeEnum, _enums.OffloadDeviceEnum


def _at(engine: Any) -> torch.device:
    """Returns the device of the engine's states. Raises ConfigError if it is not the CPU."""
    device = torch.device(engine.device)
    if device.type != "cpu":
        raise ConfigError(
            f"[deepspeed::offload_states] offload_states() is not supported on {device.type}. "
            f"Choose where states are kept in the config (offload_optimizer, offload_param)"
        )
    return device


def check_offload(engine: Any, include: Iterable[Any] | None, device: Any) -> None:
    """Checks the arguments of offload_states() as DeepSpeed does, and that nothing has to move."""
    for one in include or ():
        OffloadStateTypeEnum(one)
    place = getattr(device, "value", device)
    _Device(place)
    section = engine.zero_offload_param() or {}
    if section.get("device", "none") != "none":
        raise ConfigError(
            "[deepspeed::offload_states] offload_states() is not supported with offload_param, as "
            "in DeepSpeed"
        )
    if engine.basic_optimizer is None:
        raise ConfigError(
            "[deepspeed::offload_states] offload_states() is not supported without an optimizer"
        )
    if place == _Device.nvme.value:
        raise ValueError(
            "[deepspeed::offload_states] NVMe is not supported, as in DeepSpeed: set "
            "offload_optimizer in the config"
        )
    if place == _Device.none.value:
        logger.warning('offload_states: the device is "none", so nothing moves')
        return
    _at(engine)


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Returns the devices that hold an engine's states of this type."""
    OffloadStateTypeEnum(state)
    return {_at(model)}
