"""A rank's random generators: their states in a checkpoint, and the generators of a forward.

A checkpoint has the states of Python, numpy and the rank's device. torch's CPU generator is a
tensor of the checkpoint, which C++ also reads."""

import hashlib
import random
import sys
from typing import Any

import torch

from penstock.front.json_values import decode, encode


def states(device: torch.device) -> dict[str, Any]:
    """Returns the states for `restore`. `device` is the device on which this rank trains."""
    found = {"random": encode(random.getstate(), "random.getstate()")}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = encode((kind, keys.tolist(), *rest), "numpy.random.get_state()")
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device).tolist()
        found["device_generator"] = encode((device.type, state), "the device's get_rng_state()")
    return found


def restore(kept: dict[str, Any], device: torch.device) -> None:
    """Restores the result of `states`. Skips a device whose type differs from the saved one."""
    if "random" in kept:
        random.setstate(decode(kept["random"]))
    if "numpy" in sys.modules and "numpy" in kept:
        sys.modules["numpy"].random.set_state(decode(kept["numpy"]))
    if "device_generator" not in kept:
        return
    kind, state = decode(kept["device_generator"])
    if device.type == kind:
        there = torch.get_device_module(device)
        there.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)


def of_forward(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of the torch generators from which a forward on that device draws, for
    `set_of_forward`. The host does not wait for the device."""
    found = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        found.append(torch.get_device_module(device).get_rng_state(device))
    return found


def set_of_forward(states: list[torch.Tensor], device: torch.device) -> None:
    """Sets the states that `of_forward` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


def seed_forward(seed: int, device: torch.device) -> None:
    """Seeds the generators of `of_forward`."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        with torch.accelerator.device_index(device.index or 0):
            torch.get_device_module(device).manual_seed(seed)


def derive(state: torch.Tensor, rank: int) -> None:
    """Seeds all generators of a rank for which the checkpoint has no states.

    Args:
        state: generator state of a rank of the checkpoint, uint8.
        rank: this rank, so that each new rank gets different numbers.
    """
    text = bytes(state.tolist()) + str(rank).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    torch.manual_seed(seed)  # seeds device generators, too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
