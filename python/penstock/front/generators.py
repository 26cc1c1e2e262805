"""Random generators of a rank, in a checkpoint: Python's, numpy's, and that of the rank's device.
(torch's of the CPU is a tensor of the checkpoint, which C++ reads too.)"""

import hashlib
import random
import sys
from typing import Any

import torch

from penstock.front.json_values import decode, encode


def states(device: torch.device) -> dict[str, Any]:
    """What `restore` takes; `device` is where this rank trains."""
    found = {"random": encode(random.getstate(), "random.getstate()")}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = encode((kind, keys.tolist(), *rest), "numpy.random.get_state()")
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device).tolist()
        found["device_generator"] = encode((device.type, state), "the device's get_rng_state()")
    return found


def restore(kept: dict[str, Any], device: torch.device) -> None:
    """Of `states`. A device of another kind than the one that was saved stays as it is."""
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
    """For a rank that there was none of: all generators from another's state, but not the same."""
    text = bytes(state.tolist()) + str(rank).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    torch.manual_seed(seed)  # also those of devices
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
