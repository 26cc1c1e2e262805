"""The states of a rank's random generators in a checkpoint: Python, numpy and the rank's device.
torch's CPU generator is a tensor of the checkpoint, which C++ also reads."""

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
