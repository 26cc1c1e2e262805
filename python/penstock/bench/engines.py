"""Measures an engine's optimizer and its disk tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.bench.setting import Setting
from penstock.front import engine as engines

_WIDTH = 2048  # width of the two layers: 8.4M parameters, all updated by each rank
_UPDATE_BYTES = 28  # memory traffic per parameter: kUpdateBytes in src/plan/cost/step_time.h


@contextlib.contextmanager
def _engine(setting: Setting, offload: dict[str, str]) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yields an fp32 engine, and a function that runs its forward and its (very short) backward."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
    model.to(setting.device)
    given = torch.randn(1, _WIDTH, device=setting.device)
    config = {"strategy": "ddp", "precision": "fp32", "offload": offload}
    engine = engines.initialize(model, config)

    def passes() -> None:
        engine.backward(engine(given).square().mean())

    try:
        yield engine, passes
    finally:
        engine.close()


def _moved(engine: Any) -> float:
    """Returns the bytes that one update reads and writes in memory."""
    return float(_UPDATE_BYTES * sum(param.numel() for param in engine.module.parameters()))


def _update_s(engine: Any) -> float:
    """Returns the seconds of all updates so far.

    With optimizer state in host memory, the update lane has no other plan lines.
    """
    return float(engine._core.metrics.sums().get(("update", "line"), (0, 0, 0.0))[2])


def memory(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures the bytes/s that AdamW's update reads and writes, on the host and on the device.

    On the CPU both values are the same.
    """
    share = seconds if setting.on_host else seconds / 2
    with _engine(setting, {"optimizer": "host"}) as (engine, passes):

        def on_host() -> float:
            before = _update_s(engine)
            passes()
            engine.step()
            return _moved(engine) / (_update_s(engine) - before)

        host = setting.ranks.samples(on_host, share)
    if setting.on_host:
        return {"host_memory": host, "device_memory": host}
    with _engine(setting, {}) as (engine, passes):

        def on_device() -> float:  # includes the time of the norm, which reads the gradients
            passes()
            setting.wait()
            begin = time.perf_counter()
            engine.step()
            setting.wait()
            return _moved(engine) / (time.perf_counter() - begin)

        return {"host_memory": host, "device_memory": setting.ranks.samples(on_device, share)}


def disk(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures the bytes/s read and written while the disk has requests.

    The optimizer state is on disk.
    """
    with _engine(setting, {"optimizer": "disk", "path": setting.disk}) as (engine, passes):

        def run() -> float:
            passes()
            engine.step()
            return float(engine.metrics["disk_gb_per_s"]) * 1e9

        return {"host_disk": setting.ranks.samples(run, seconds)}
