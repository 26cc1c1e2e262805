"""Copies between a device and host memory are late: what the host reads and writes itself is as on
a CPU."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import sim
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.skipif(on_device.NAME != "sim", reason="only there copies can be late")

WIDTH = 64
ON_HOST = {"optimizer": "host", "gradients": "host"}
# The optimizer's state rests on the host, and the device updates it.
SENT_BACK = {"optim": {"rest": "SS@host:fp32", "update": "SS@device:fp32"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def start(config: dict[str, Any], place: str) -> tuple[Any, torch.Tensor]:
    import penstock  # noqa: PLC0415

    settings = {"strategy": "zero3", "optimizer": {"type": "AdamW", "lr": 1e-2}, "clip": 1.0}
    units = {"units": {"modules": ["Linear"]}}
    engine = penstock.initialize(Net().to(place), settings | units | config)
    torch.manual_seed(1 + dist.get_rank())
    return engine, torch.randn(8, WIDTH).to(place)


def backward(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().mean())


def set_gradients(engine: Any, x: torch.Tensor, _: str) -> Any:
    """Gradients in host memory that replace those of a backward."""
    names = [name for name, _ in engine.module.named_parameters()]
    for step in range(3):
        backward(engine, x)
        shapes = {name: (WIDTH, WIDTH) if "weight" in name else (WIDTH,) for name in names}
        engine.set_grads({name: torch.full(shapes[name], 0.1 + step) for name in names})
        engine.step()
    return engine.grad_norm


def drop_gradients(engine: Any, x: torch.Tensor, _: str) -> Any:
    norms = []
    for _ in range(3):
        backward(engine, x)
        for name, param in engine.module.named_parameters():
            if ".1." in name or ".2.weight" in name:
                param.grad = None
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def read_state(engine: Any, x: torch.Tensor, _: str) -> Any:
    found = []
    for _ in range(3):
        backward(engine, x)
        engine.step()
        for name, param in engine.module.named_parameters():
            if "weight" in name:
                found.append(engine.param_state(param, "exp_avg").cpu())
    return found


def write_state(engine: Any, x: torch.Tensor, _: str) -> Any:
    for step in range(3):
        backward(engine, x)
        engine.step()
        for name, param in engine.module.named_parameters():
            if ".1.weight" in name:
                engine.set_param_state(param, "exp_avg", torch.full((WIDTH, WIDTH), 0.5 + step))
                engine.set_param_state(param, "param", torch.full((WIDTH, WIDTH), 0.01 * step))
    return None


def save_and_load(engine: Any, x: torch.Tensor, folder: str) -> Any:
    backward(engine, x)
    engine.step()
    engine.save(folder)
    backward(engine, x)
    engine.step()
    engine.load(folder)
    backward(engine, x)
    engine.step()
    return None


def keep_views(engine: Any, x: torch.Tensor, _: str) -> Any:
    """Views that outlive the block in which parameters are whole, and new memory for one."""
    backward(engine, x)
    engine.step()
    params = list(engine.module.parameters())
    values = engine._core.values
    with engine.gathered():
        # As the drop-in's GatheredParameters does, whose views outlive it.
        values.keep_views(values.units_of([engine._structure.own[one] for one in params]))
        kept = [param.data for param in params]
    with engine.gathered(write=True):
        param = engine.module.blocks[1].weight
        before = param.detach()
        param.data = torch.full_like(param, 0.25)
    found = [one.float().cpu() for one in (*kept, before)]
    backward(engine, x)
    engine.step()
    return found


CASES = {
    "set_grads": (set_gradients, {"offload": ON_HOST}),
    "set_grads_optimizer": (set_gradients, {"offload": {"optimizer": "host"}}),
    "grad_none": (drop_gradients, {"offload": ON_HOST}),
    "grad_none_optimizer": (drop_gradients, {"offload": {"optimizer": "host"}}),
    "read_state": (read_state, {"table": SENT_BACK}),
    "write_state": (write_state, {"table": SENT_BACK}),
    "load": (save_and_load, {"table": SENT_BACK}),
    "views": (keep_views, {"offload": {"params": "host", "optimizer": "host"}}),
    "views_device": (keep_views, {}),
}


def run(name: str, place: str | None, folder: str) -> Any:
    """What the case returned, and the weights at its end. `place`: None for the device."""
    case, config = CASES[name]
    if place is None:
        place = on_device.device()
        on_device.schedule(3)
    engine, x = start(config, place)
    if place != "cpu":
        sim.set_delays_us(300, 1500)
    try:
        told = case(engine, x, folder)
        weights = {key: value.float().cpu() for key, value in engine.state_dict().items()}
    finally:
        if place != "cpu":
            sim.set_delays_us(0, 50)
    engine.close()
    return told, weights


def flat(found: Any) -> list[float]:
    if found is None:
        return []
    if isinstance(found, torch.Tensor):
        return found.flatten().tolist()
    if isinstance(found, dict):
        found = list(found.values())
    return sum(map(flat, found), []) if isinstance(found, (list, tuple)) else [float(found)]


@pytest.mark.parametrize("name", list(CASES))
def test_the_host_sees_what_a_cpu_has(name, device_pools, pools, tmp_path):
    expected = pools(2).run(run, name, "cpu", str(tmp_path / "cpu"))
    found = device_pools(2).run(run, name, None, str(tmp_path / "device"))
    for (told, weights), (expected_told, expected_weights) in zip(found, expected, strict=True):
        assert flat(told) == pytest.approx(flat(expected_told), rel=1e-4, abs=1e-5)
        assert flat(weights) == pytest.approx(flat(expected_weights), rel=1e-4, abs=1e-5)
