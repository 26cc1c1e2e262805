"""Timers for scripts, and those of the engine (wall_clock_breakdown)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from penstock.monitor.deepspeed_comms import trim_mean as trim_mean

from .._refusal import DeepSpeedRefusal
from .logging import logger


class SynchronizedWallClockTimer:
    """Timers by name."""

    class Timer:
        """One timer. Its times are in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_, self.started_ = name, False
            self._since, self._spent = 0.0, list[float]()

        def start(self) -> None:
            """Raises DeepSpeedRefusal if the timer runs already."""
            if self.started_:
                raise DeepSpeedRefusal(f"[deepspeed::timer] {self.name_} has already been started")
            self.started_, self._since = True, time.perf_counter()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Raises DeepSpeedRefusal if the timer does not run."""
            if not self.started_:
                raise DeepSpeedRefusal(f"[deepspeed::timer] {self.name_} is not started")
            if reset:
                self._spent.clear()
            self._spent.append((time.perf_counter() - self._since) * 1e3)
            self.started_ = False

        def reset(self) -> None:
            self.started_ = False
            self._spent.clear()

        def elapsed(self, reset: bool = True) -> float:
            """Returns the time so far. A running timer keeps running."""
            runs = self.started_
            if runs:
                self.stop()
            spent = sum(self._spent)
            if reset:
                self.reset()
            if runs:
                self.start()
            return spent

        def mean(self) -> float:
            return trim_mean(self._spent, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints the named timers in milliseconds on these ranks (default: 0), and resets them on
        every rank."""
        known = [one for one in names if self.has_timer(one)]
        times = [f"{one}: {self.timers[one].elapsed(reset) / normalizer:.2f}" for one in known]
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank not in (ranks or (0,)) and -1 not in (ranks or ()):
            return
        print(f"[Rank {rank}] " + " | ".join(("time (ms)", *times)))

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Returns the mean of each named timer in microseconds."""
        known = [one for one in names if self.has_timer(one)]
        return {one: self.timers[one].mean() * 1e3 / normalizer for one in known}


class ThroughputTimer:
    """Measures the samples per second of a loop that calls start() and stop() around each step."""

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.batch_size, self.start_step = batch_size or 1, start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or logger.info
        self.enabled = getattr(config, "enabled", True)
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.initialized = self.started = False
        self.start_time = self.end_time = self.step_elapsed_time = self.total_elapsed_time = 0.0

    def start(self) -> None:
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends what start() began; without it, does nothing."""
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time:
            self.end_time = time.perf_counter()
            self.step_elapsed_time += self.end_time - self.start_time
            self.total_elapsed_time += self.end_time - self.start_time
        if not global_step:
            return
        every = self.steps_per_output
        if self.start_time and report_speed and every and self.global_step_count % every == 0:
            self.logging(
                f"micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={self.batch_size / self.step_elapsed_time}"
            )
        self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        """Counts an epoch. The count of micro-batches starts again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def avg_samples_per_sec(self) -> float:
        steps = self.global_step_count - self.start_step
        timed = steps > 0 and self.total_elapsed_time > 0
        return self.batch_size * steps / self.total_elapsed_time if timed else float("-inf")
