"""The ranks that measure at the same time, since they share cores, links and disk in training."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_FEWEST = 3  # runs, whatever the time


@dataclass(frozen=True)
class Spread:
    """Quartiles of what all ranks measured."""

    median: float
    low: float  # quartiles
    high: float
    runs: int


class RankGroup:
    """All ranks of the launcher; one alone without it. `close()` ends it."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def close(self) -> None:
        """All ranks call it, or none."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def agree(self, wanted: bool) -> bool:
        """Rank 0's answer on all ranks, which go on from here at the same time."""
        if self.world == 1:
            return wanted
        answer = torch.tensor([float(wanted)])
        dist.all_reduce(answer if self.rank == 0 else answer.zero_())
        return bool(answer.item())

    def all_of(self, own: T) -> list[T]:
        """What each rank has, by rank."""
        found = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(found, own)
        return found

    def samples(self, run: Callable[[], float], seconds: float) -> list[float]:
        """What `run()` returns, again and again for so long, on all ranks as often. The first run
        warms up and does not count."""
        found: list[float] = []
        self.agree(True)
        run()
        end = time.perf_counter() + seconds
        while self.agree(len(found) < _FEWEST or time.perf_counter() < end):
            found.append(run())
        return found

    def spread(self, own: list[float]) -> Spread:
        """Over the samples of all ranks."""
        pooled = [one for samples in self.all_of(own) for one in samples]
        low, median, high = statistics.quantiles(pooled, n=4, method="inclusive")
        return Spread(median, low, high, len(own))
