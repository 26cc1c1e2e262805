"""Training the parity models on a device: what a rank's process runs."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import models
import sim
import torch
import torch.distributed as dist
import training
from training import Case, Run

NAME = os.environ.get("PENSTOCK_TEST_DEVICE", "sim")


@functools.cache
def device() -> str:
    """This rank's."""
    if NAME == "sim":
        sim.start()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"{NAME}:{rank % torch.accelerator.device_count()}"


def count() -> int:
    """How many devices there are. Each rank needs its own: NCCL refuses two ranks on one."""
    return sim.DEVICES if NAME == "sim" else torch.accelerator.device_count()


def schedule(seed: int) -> None:
    """Of a simulated device: how late what is queued there runs. On CUDA, attention gets kernels
    that add up in one order, because tests compare runs bit by bit."""
    place = device()
    if NAME == "sim":
        sim.set_seed(seed)
        sim.set_delays_us(0, 50)
    if NAME == "cuda":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.accelerator.set_device_index(torch.device(place).index)


def start(strategy: str, **config: Any) -> tuple[Any, Callable[[], None]]:
    """An engine of the GPT on this rank's device, and a call that makes a step of it."""
    import penstock  # noqa: PLC0415 - the parent does without

    torch.manual_seed(0)
    schedule(0)
    place = device()
    case = Case(strategy, world=dist.get_world_size())
    engine = penstock.initialize(training.moved(models.Gpt(), place), case.config() | config)
    batch = models.batches("gpt", 1, case.samples)[0]

    def step() -> None:
        training.backwards(engine, batch, 1, device=place)
        engine.step()

    return engine, step


def train(case: Case, seed: int, folder: str, **overrides: Any) -> tuple[Run, str]:
    """training.train() on this rank's device."""
    schedule(seed)
    offload = overrides.get("offload", {})
    if "disk" in offload.values():
        overrides |= {"offload": offload | {"path": folder}}
    run, digest = training.train(case, device=device(), **overrides)
    assert not folder or not list(pathlib.Path(folder).iterdir()), "a swap file has a name"
    return run, digest


def reference(asked: tuple[Any, ...]) -> Run:
    """training.reference() on the device of a process of its own."""
    schedule(0)
    return training.reference(*asked, device=device())


def train_recomputed(case: Case, seed: int, folder: str, activations: str) -> tuple[Run, str]:
    """With units' inputs large enough to be moved, which wait for the backward on that tier."""
    samples, training.MICRO = training.MICRO, 12
    try:
        offload = {"activations": activations}
        return train(case, seed, folder, offload=offload, activations={"checkpoint": "unit"})
    finally:
        training.MICRO = samples
