"""The device on which a rank trains a model."""

import os
import warnings
from typing import Any

import torch

from penstock._native import ConfigError
from penstock.front import module_tree

DeviceLike = torch.device | str | None


def resolved(device: DeviceLike, call: str) -> torch.device:
    """Returns this rank's device of that kind. Unless it is the CPU, the result has an index.

    If `device` has no index, the result is torch's current device or, if that is device 0, the
    device with the number LOCAL_RANK (modulo the number of devices).

    Args:
        device: "cuda", "cuda:1", "cpu", or None for the machine's accelerator, if it has one.
        call: the function that is named in errors.

    Raises:
        ConfigError: if the machine has no such device.
    """
    own = _accelerator()
    try:
        wanted = (own or torch.device("cpu")) if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"[front::{call}] device is {device!r}: {error}") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if own is None or own.type != wanted.type:
        raise ConfigError(
            f'[front::{call}] device is "{wanted}", but this machine has '
            f"{'no accelerator' if own is None else f'{own.type!r}'}. Pass "
            f'"{"cpu" if own is None else own.type}", or leave it out'
        )
    count = torch.accelerator.device_count()
    index = _index(count) if wanted.index is None else wanted.index
    if index >= count:
        raise ConfigError(
            f'[front::{call}] device is "{wanted}", but this process has {count} of them. Pass '
            f'"{wanted.type}:0" to "{wanted.type}:{count - 1}", or "{wanted.type}" for this '
            f"rank's device"
        )
    return torch.device(wanted.type, index)


_MANY_CORES = 4  # per rank; with so many, one thread for the optimizer is a mistake


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _index(count: int) -> int:
    now, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    return int(local) % count if now == 0 and local.isdigit() else now


def of_model(
    model: torch.nn.Module, device: DeviceLike, held: Any, warns: bool = True
) -> torch.device | None:
    """Returns the device to which `initialize()` moves the model, or None if the model stays.

    Args:
        device: the argument of `initialize()`. Without it, a model built under `penstock.init()`
            trains on the device of that context.
        held: the store of parameters built under `penstock.init()`, or None.
        warns: whether to warn of an accelerator that a model on the CPU does not use.

    Raises:
        ConfigError: if the machine has no such device, or the contexts of the model's parameters
            have different devices.
    """
    if device is not None:
        return resolved(device, "initialize")
    found: dict[torch.device, str] = {}
    for name, param in module_tree.params_of(model):
        if held is not None and held.holds(param):
            found.setdefault(held.device_of(param), name)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ConfigError(
            f'[front::initialize] parameter "{first}" was built for {one} and "{second}" for '
            f"{other}, but an engine trains on one device per rank. Pass initialize(device=...)"
        )
    if not found and warns:
        _warn_of_idle(module_tree.device_of(model))
    return next(iter(found), None)


def _warn_of_idle(device: torch.device) -> None:
    """Warns of an unused accelerator, if the model (on `device`) is on the CPU."""
    idle = _accelerator()
    if device.type != "cpu" or idle is None:
        return
    warnings.warn(
        f"[front::initialize] the model is on the CPU and trains there, but this machine has "
        f'"{idle}". To train on it, pass initialize(device="{idle}"); to train on the CPU, pass '
        f'device="cpu"',
        RuntimeWarning,
        stacklevel=5,
    )


def warn_of_one_thread(model: torch.nn.Module, device: torch.device | None, config: Any) -> None:
    """Warns on a node's first rank if OMP_NUM_THREADS slows the optimizer on the host down.

    Args:
        device: where the model trains, or None if it stays where it is.
        config: the engine's config.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    cores = len(os.sched_getaffinity(0)) // ranks
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    place = device or module_tree.device_of(model)
    if place.type == "cpu" or config.offload.optimizer == "none" or not first:
        return
    if os.environ.get("OMP_NUM_THREADS") != "1" or cores < _MANY_CORES:
        return
    warnings.warn(
        f"[front::initialize] OMP_NUM_THREADS is 1 (torchrun sets it), so the optimizer on the "
        f"host uses one of {cores} cores per rank. Set OMP_NUM_THREADS={cores}",
        RuntimeWarning,
        stacklevel=5,
    )
