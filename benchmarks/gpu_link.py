"""The link between a device and pinned host memory: the engine's moves beside plain copies.

    python benchmarks/gpu_link.py [--device cuda] [--budget-s 60] [--json FILE]

Plain copies between pinned memory and the device are timed in several sizes, one way and both ways
at once; the best of each is the limit. The engine trains a chain of large layers on one row of
input, so next to nothing is computed: with parameters and gradients on the host its forward takes
as long as the parameters take to the device, and its backward as long as they take once more while
the gradients, as many bytes, come back.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import accelerator
import torch
from accelerator import MIB, Deadline
from measure import write_json
from torch import nn

import penstock

GB = 1e9


class Layer(nn.Module):
    """One matrix: what the engine moves at a time."""

    def __init__(self, width: int, wide: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, wide))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ self.weight)[:, : x.shape[1]]


class Chain(nn.Module):
    def __init__(self, layers: int, width: int, wide: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, wide) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@dataclasses.dataclass
class Engine:
    """What the engine reached with one setting of `prefetch_bytes`."""

    prefetch_bytes: int
    unit_bytes: int
    bytes: int  # of all parameters, in bf16
    forward_s: list[float] = dataclasses.field(default_factory=list)
    backward_s: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)

    def rates(self) -> dict[str, float]:
        """Bytes per second: of the forward, to the device; of the backward, both ways together."""
        return {
            "to_device": self.bytes / statistics.median(self.forward_s),
            "both": 2 * self.bytes / statistics.median(self.backward_s),
        }


def timed(device: torch.device, times: list[float], action: Any) -> Any:
    accelerator.synchronize(device)
    begin = time.perf_counter()
    result = action()
    accelerator.synchronize(device)
    times.append(time.perf_counter() - begin)
    return result


def through_engine(device: torch.device, prefetch_bytes: int, deadline: Deadline) -> Engine:
    real = accelerator.is_real(device)
    layers, width, wide = (32, 4096, 8192) if real else (6, 64, 256)
    torch.manual_seed(0)
    with torch.device(device):
        model = Chain(layers, width, wide)
    found = Engine(prefetch_bytes, 2 * width * wide, 2 * layers * width * wide)
    engine = penstock.initialize(
        model,
        strategy="zero3",
        precision="bf16",
        units={"modules": [Layer.__name__]},
        offload={"optimizer": "host", "params": "host", "gradients": "host"},
        optimizer={"type": "SGD", "lr": 1e-4},  # reads least on the host
        prefetch_bytes=prefetch_bytes,
    )
    x = torch.randn(1, width, device=device, dtype=torch.bfloat16)
    rounds = 0
    while rounds < 3 or (rounds < 12 and deadline.left_s() > 0):
        loss = timed(device, found.forward_s, functools.partial(engine, x))
        timed(device, found.backward_s, functools.partial(engine.backward, loss))
        timed(device, found.step_s, engine.step)
        rounds += 1
    for times in (found.forward_s, found.backward_s, found.step_s):
        del times[:2]  # the first makes the plans, the second follows them for the first time
    engine.close(gather=False)
    return found


def report(whole: dict[str, Any]) -> None:
    print(f"{'plain copies of':<22}{'to device':>11}{'to host':>9}{'both':>8}  GB/s")
    for size, rates in whole["copies"].items():
        cells = "".join(
            f"{rates.get(kind, 0.0) / GB:>{width}.1f}"
            for kind, width in (("to_device", 11), ("to_host", 9), ("both", 8))
        )
        print(f"{int(size) // MIB:>15} MiB   {cells}")
    print(
        f"\n{'the engine, prefetch':<22}{'forward':>11}{'of best':>9}{'backward':>10}{'of best':>9}"
    )
    for one in whole["engine"]:
        rates, best = one["rates"], whole["best"]
        both = best.get("both", best["to_device"])
        print(
            f"{one['prefetch_bytes'] // MIB:>15} MiB   {rates['to_device'] / GB:>11.1f}"
            f"{rates['to_device'] / best['to_device']:>9.2f}{rates['both'] / GB:>10.1f}"
            f"{rates['both'] / both:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda", "sim", "cpu"')
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    deadline = Deadline(options.budget_s)
    device = accelerator.open_device(options.device)
    sizes = accelerator.link_sizes(device)
    copies = {str(size): accelerator.link_rates(device, size) for size in sizes}
    kinds = next(iter(copies.values()))
    best = {kind: max(rates[kind] for rates in copies.values()) for kind in kinds}
    whole = {"machine": accelerator.described(device), "copies": copies, "best": best, "engine": []}
    write_json(options.json, whole)
    for prefetch_bytes in (64 * MIB, 256 * MIB):
        found = through_engine(device, prefetch_bytes, Deadline(deadline.left_s() / 2))
        whole["engine"].append(dataclasses.asdict(found) | {"rates": found.rates()})
        write_json(options.json, whole)
    report(whole)


if __name__ == "__main__":
    main()
