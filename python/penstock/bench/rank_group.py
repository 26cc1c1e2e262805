"""The ranks that measure. All measure at once, because in training they share cores, links and
disks."""

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
_FEWEST = 3  # minimum number of runs, even if the time is up


@dataclass(frozen=True)
class Spread:
    """Quartiles of the samples of all ranks."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile
    runs: int  # samples per rank


class RankGroup:
    """The ranks that a launcher started, or else a single rank. `close()` must be called."""

    def __init__(self) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def close(self) -> None:
        """Ends the group. All ranks must call it, or none."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def agree(self, wanted: bool) -> bool:
        """Returns rank 0's value on all ranks. The call is also a barrier."""
        if self.world == 1:
            return wanted
        answer = torch.tensor([float(wanted)])
        dist.all_reduce(answer if self.rank == 0 else answer.zero_())
        return bool(answer.item())

    def all_of(self, own: T) -> list[T]:
        """Returns the values of all ranks, by rank. All ranks must call it."""
        found = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(found, own)
        return found

    def samples(self, run: Callable[[], float], seconds: float) -> list[float]:
        """Calls `run()` repeatedly for `seconds`, equally often on all ranks. Returns its values.

        The first call is a warm-up, and its value is dropped.
        """
        found: list[float] = []
        self.agree(True)
        run()
        end = time.perf_counter() + seconds
        while self.agree(len(found) < _FEWEST or time.perf_counter() < end):
            found.append(run())
        return found

    def spread(self, own: list[float]) -> Spread:
        """Returns the quartiles over the samples of all ranks. All ranks must call it."""
        pooled = [one for samples in self.all_of(own) for one in samples]
        low, median, high = statistics.quantiles(pooled, n=4, method="inclusive")
        return Spread(median, low, high, len(own))
