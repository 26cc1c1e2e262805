"""What an engine reaches: its optimizer, and its disk tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.bench.setting import Setting
from penstock.front import engine as engines

_WIDTH = 2048  # of two layers: 8.4M parameters, which each rank updates
_UPDATE_BYTES = 28  # of memory for a parameter: kUpdateBytes of src/plan/cost/step_time.h


@contextlib.contextmanager
def _engine(setting: Setting, offload: dict[str, str]) -> Iterator[tuple[Any, Callable[[], None]]]:
    """One that trains in fp32, and its forward and backward, which are next to nothing."""
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
    """Bytes of memory for one update."""
    return float(_UPDATE_BYTES * sum(param.numel() for param in engine.module.parameters()))


def _update_s(engine: Any) -> float:
    """Of all updates so far: with an optimizer in host memory its lane has no other lines."""
    return float(engine._core.metrics.sums().get(("update", "line"), (0, 0, 0.0))[2])


def memory(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Bytes/s of AdamW's update, by what it has to read and write: on the host, and on the device,
    which on the CPU is the same."""
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

        def on_device() -> float:  # the norm, which reads the gradients, is in its time
            passes()
            setting.wait()
            begin = time.perf_counter()
            engine.step()
            setting.wait()
            return _moved(engine) / (time.perf_counter() - begin)

        return {"host_memory": host, "device_memory": setting.ranks.samples(on_device, share)}


def disk(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Bytes/s read and written while the disk had requests, with the optimizer's state there."""
    with _engine(setting, {"optimizer": "disk", "path": setting.disk}) as (engine, passes):

        def run() -> float:
            passes()
            engine.step()
            return float(engine.metrics["disk_gb_per_s"]) * 1e9

        return {"host_disk": setting.ranks.samples(run, seconds)}
