"""The link between a device and pinned host memory: the engine's moves beside plain copies.

    python benchmarks/gpu_link.py [--device cuda] [--budget-s 120] [--json FILE]

Plain copies between pinned memory and the device are timed in several sizes, one way and both ways
at once; the best of each is the limit. The engine trains a chain of large layers on one row of
input, so next to nothing is computed. Its units have 64 MiB, of which several move ahead with a
large `prefetch_bytes`, or 400 MB, as a block of a 7B model has, of which one does. With parameters
and gradients on the host, a forward takes as long as the parameters take to the device, and a
backward as long as they take once more while the gradients, as many bytes, come back.
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain of layers, and the setting `prefetch_bytes`."""

    layers: int
    width: int
    wide: int
    prefetch_bytes: int


REAL = (
    Case(32, 4096, 8192, 64 * MIB),
    Case(32, 4096, 8192, 256 * MIB),
    Case(8, 8192, 24576, 64 * MIB),
)
SMALL = (Case(6, 64, 256, 64 * MIB), Case(3, 128, 768, MIB // 8))


@dataclasses.dataclass
class Engine:
    """What the engine reached in one case."""

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


def through_engine(device: torch.device, case: Case, deadline: Deadline) -> Engine:
    torch.manual_seed(0)
    with torch.device(device):
        model = Chain(case.layers, case.width, case.wide)
    unit_bytes = 2 * case.width * case.wide
    found = Engine(case.prefetch_bytes, unit_bytes, case.layers * unit_bytes)
    engine = penstock.initialize(
        model,
        strategy="zero3",
        precision="bf16",
        units={"modules": [Layer.__name__]},
        offload={"optimizer": "host", "params": "host", "gradients": "host"},
        optimizer={"type": "SGD", "lr": 1e-4},  # reads least on the host
        prefetch_bytes=case.prefetch_bytes,
    )
    x = torch.randn(1, case.width, device=device, dtype=torch.bfloat16)
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
    print(f"\n{'units':>10}{'prefetch':>12}{'forward':>11}{'of best':>9}{'backward':>10}", end="")
    print(f"{'of best':>9}")
    for one in whole["engine"]:
        rates, best = one["rates"], whole["best"]
        both = best.get("both", best["to_device"])
        print(
            f"{one['unit_bytes'] / 1e6:>7.1f} MB{one['prefetch_bytes'] / 1e6:>9.1f} MB"
            f"{rates['to_device'] / GB:>11.1f}"
            f"{rates['to_device'] / best['to_device']:>9.2f}{rates['both'] / GB:>10.1f}"
            f"{rates['both'] / both:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda", "sim", "cpu"')
    parser.add_argument("--budget-s", type=float, default=120.0)
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
    cases = REAL if accelerator.is_real(device) else SMALL
    for index, case in enumerate(cases):
        found = through_engine(device, case, Deadline(deadline.left_s() / (len(cases) - index)))
        whole["engine"].append(dataclasses.asdict(found) | {"rates": found.rates()})
        write_json(options.json, whole)
    report(whole)


if __name__ == "__main__":
    main()
