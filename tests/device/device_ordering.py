"""A small offload engine, each of whose synchronizations can be left out. It streams weights from
pinned memory through two window slots on a copy stream and brings results back on another."""

from __future__ import annotations

import sim
import torch

LAYERS, WIDTH, SLOTS = 8, 32, 2

COMPUTE_BEFORE_COPY = "compute does not wait for the copy"
SLOT_TOO_EARLY = "the copy does not wait for the slot's last reader"
RESULT_BEFORE_COMPUTE = "the copy back does not wait for compute"
NO_RECORD_STREAM = "no record_stream on a temporary"
READ_TOO_EARLY = "the host reads before the copy back is done"
STAGING_TOO_EARLY = "the host overwrites staging memory that is being copied"
LEFT_OUT = (
    COMPUTE_BEFORE_COPY,
    SLOT_TOO_EARLY,
    RESULT_BEFORE_COMPUTE,
    NO_RECORD_STREAM,
    READ_TOO_EARLY,
    STAGING_TOO_EARLY,
)


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).pin_memory()


class OffloadEngine:
    """One forward pass: x = tanh(x @ weight) for each weight, and the sum of each x to the host."""

    def __init__(self, weights: list[torch.Tensor], left_out: str | None):
        self.weights, self.left_out = weights, left_out
        flat = torch.empty(SLOTS, WIDTH, WIDTH, device="sim")
        self.slots = [flat[slot] for slot in range(SLOTS)]
        self.staging = [pinned(WIDTH, WIDTH) for _ in range(2)]
        self.results = [pinned(WIDTH) for _ in weights]
        self.main = torch.accelerator.current_stream()
        self.up, self.down = torch.Stream("sim"), torch.Stream("sim")
        self.up.wait_stream(self.main)
        self.filled: list[torch.Event | None] = [None] * SLOTS
        self.read: list[torch.Event | None] = [None] * SLOTS
        self.staged: list[torch.Event | None] = [None, None]
        self.copied: list[torch.Event] = []

    def keeps(self, synchronization: str) -> bool:
        return synchronization != self.left_out

    def fetch(self, layer: int) -> None:
        slot, half = layer % SLOTS, layer % 2
        staged = self.staged[half]
        if staged is not None and self.keeps(STAGING_TOO_EARLY):
            staged.synchronize()
        self.staging[half].copy_(self.weights[layer])
        with self.up:
            read = self.read[slot]
            if read is not None and self.keeps(SLOT_TOO_EARLY):
                self.up.wait_event(read)
            self.slots[slot].copy_(self.staging[half], non_blocking=True)
            self.filled[slot] = self.staged[half] = self.up.record_event()

    def bring_back(self, layer: int, x: torch.Tensor) -> None:
        result = (x * 2).sum(0)
        computed = self.main.record_event()
        with self.down:
            if self.keeps(RESULT_BEFORE_COMPUTE):
                self.down.wait_event(computed)
            self.results[layer].copy_(result, non_blocking=True)
            if self.keeps(NO_RECORD_STREAM):
                result.record_stream(self.down)
            self.copied.append(self.down.record_event())

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The last x and the sums, on the host."""
        self.fetch(0)
        for layer in range(LAYERS):
            if layer + 1 < LAYERS:
                self.fetch(layer + 1)
            filled = self.filled[layer % SLOTS]
            assert filled is not None
            if self.keeps(COMPUTE_BEFORE_COPY):
                self.main.wait_event(filled)
            x = torch.tanh(x @ self.slots[layer % SLOTS])
            self.read[layer % SLOTS] = self.main.record_event()
            self.bring_back(layer, x)
        if self.keeps(READ_TOO_EARLY):
            for copied in self.copied:
                copied.synchronize()
        results = [result.clone() for result in self.results]
        torch.accelerator.synchronize()
        return [x.cpu(), *results]


def is_right(seed: int, left_out: str | None) -> bool:
    """Whether the engine gives the CPU's numbers under this seed's delays."""
    sim.set_seed(seed)
    sim.set_delays_us(0, 50)
    numbers = torch.Generator().manual_seed(seed)
    weights = [torch.randn(WIDTH, WIDTH, generator=numbers) / 6 for _ in range(LAYERS)]
    x = start = torch.randn(8, WIDTH, generator=numbers)
    sums = []
    for weight in weights:
        x = torch.tanh(x @ weight)
        sums.append((x * 2).sum(0))
    got = OffloadEngine(weights, left_out).run(start.to("sim"))
    sim.set_delays_us(0, 0)
    return all(map(torch.equal, got, [x, *sums]))


def seeds_that_find(left_out: str | None, seeds: int) -> list[int]:
    return [seed for seed in range(seeds) if not is_right(seed, left_out)]
