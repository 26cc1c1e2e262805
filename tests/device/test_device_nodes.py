"""Values for users between nodes: the devices gather them, in pieces, and they have the bits of the
parameters and gradients that the plan gathers."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import sim
import torch
import torch.distributed as dist
from test_device_faults import raise_on_one
from torch import nn

pytestmark = pytest.mark.skipif(on_device.count() < 4, reason="needs four devices")

LARGE = 3072  # 36 MiB of fp32 in one weight: two pieces
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1", "precision": "bf16"},
    "zero3": {"strategy": "zero3", "precision": "bf16"},
    "zero3-fp32": {"strategy": "zero3"},
    "zero3-host": {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "host", "params": "host", "gradients": "host"},
    },
    "zero3-chunks": {
        "strategy": "zero3",
        "precision": "bf16",
        "offload": {"optimizer": "disk", "window_bytes": 4096},
    },
    "zero1-over-nodes": {
        "strategy": "zero1",
        "precision": "bf16",
        "table": {
            "grad": {"update": "SR@device:bf16"},
            "optim": {"rest": "SR@device:fp32", "update": "SR@device:fp32"},
        },
    },
    "hpz": {"strategy": "hpz", "precision": "bf16"},
    "mics": {"strategy": "mics", "precision": "bf16"},
    "zero2-frozen": {"strategy": "zero2", "precision": "bf16"},
    "zero3-frozen": {"strategy": "zero3", "precision": "bf16"},
}
BETWEEN_NODES = set(CASES) - {"mics"}


class Net(nn.Module):
    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.blocks[1].requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def read_all(config: dict[str, Any], width: int, frozen: bool, folder: str) -> Any:
    """Reads the values in each way. Returns the weights, the gradients, and the bytes per parameter
    that devices exchanged for the weights of every rank and of the first."""
    import penstock  # noqa: PLC0415

    on_device.schedule(0)
    place, rank = on_device.device(), dist.get_rank()
    config = config | {"mesh": {"node": 2}, "units": {"modules": ["Linear"]}}
    if "disk" in config.get("offload", {}).values():
        config["offload"] = config["offload"] | {"path": folder}
    engine = penstock.initialize(Net(width, frozen).to(place), config)
    model = engine.module
    torch.manual_seed(rank)
    precision = torch.bfloat16 if "precision" in config else torch.float32
    x = torch.randn(4, width).to(place, precision)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    with engine.gathered():
        seen = {name: one.detach().float().cpu() for name, one in model.named_parameters()}
    sim.reset_counters()
    everywhere = engine.state_dict(rank0_only=False, device="cpu")
    moved = sim.counters().collectives.bytes
    sim.reset_counters()
    first = engine.state_dict()
    moved_to_first = sim.counters().collectives.bytes
    engine.backward(engine(x).square().mean())
    gradients = {name: one.cpu() for name, one in engine.full_grads().items()}
    engine.step()
    last = engine.state_dict(rank0_only=False, device="cpu")
    engine.close()
    left = {name: one.detach().float().cpu() for name, one in model.named_parameters()}
    for name, one in seen.items():
        assert torch.equal(everywhere[name].to(precision).float(), one), name
        assert torch.equal(last[name].to(precision).float(), left[name]), name
        assert rank > 0 or torch.equal(first[name], everywhere[name]), name
    parameters = sum(one.numel() for one in seen.values())
    return everywhere, gradients, moved / parameters, moved_to_first / parameters


@pytest.mark.parametrize("name", CASES)
def test_values_between_nodes(name, device_pools, tmp_path):
    """Every rank reads the same, and the devices move the values if shards are on several nodes."""
    frozen = "frozen" in name
    read = device_pools(4).run(read_all, CASES[name], 256, frozen, str(tmp_path), timeout=180)
    for weights, gradients, moved, moved_to_first in read:
        for key, value in read[0][0].items():
            assert torch.equal(weights[key], value), key
        for key, value in read[0][1].items():
            assert torch.equal(gradients[key], value), key
        if name in BETWEEN_NODES:
            assert moved > 1 and moved_to_first > 1, "the devices moved no values"
        else:
            assert moved == moved_to_first == 0


def test_large_values_travel_in_pieces(device_pools, tmp_path):
    pool = device_pools(4)
    pool.run(read_all, CASES["zero3"], LARGE, False, str(tmp_path), timeout=300)


@pytest.mark.parametrize(("where", "strategy"), [("forward", "zero3"), ("backward", "zero1")])
def test_weights_come_back_after_a_fault(where, strategy, device_pools):
    """close() after a fault gathers through host memory: the devices' connections are aborted."""
    outcomes = device_pools(4).run(raise_on_one, where, strategy, {}, {"node": 2}, timeout=180)
    assert outcomes[1] == "ValueError: this rank's data is bad"
    assert all("this rank's data is bad" in told for told in outcomes)
