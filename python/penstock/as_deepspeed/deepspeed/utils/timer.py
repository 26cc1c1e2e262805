"""Timers for scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock import ConfigError

from .logging import log_dist


class SynchronizedWallClockTimer:
    """Timers by name."""

    class Timer:
        """One timer. Its times are in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_, self.started_ = name, False
            self._since, self._spent = 0.0, 0.0

        def start(self) -> None:
            self.started_, self._since = True, time.perf_counter()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            spent = (time.perf_counter() - self._since) * 1e3
            self._spent = spent if reset else self._spent + spent
            self.started_ = False

        def reset(self) -> None:
            self.started_, self._spent = False, 0.0

        def elapsed(self, reset: bool = True) -> float:
            spent = self._spent
            if reset:
                self.reset()
            return spent

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def log(self, names: Sequence[str], normalizer: float = 1.0, **_: Any) -> None:
        """Logs the named timers in milliseconds on rank 0, and resets them."""
        parts = [
            f"{one}: {self.timers[one].elapsed() / normalizer:.2f}"
            for one in names
            if self.has_timer(one)
        ]
        log_dist("time (ms) | " + " | ".join(parts), ranks=[0])


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Returns the mean without that share of the values at both ends; 0 without data."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ConfigError(
            f"[deepspeed::trim_mean] trim_percent is {trim_percent}; allowed: a fraction from 0 "
            f"to 1"
        )
    left_out = round(len(data) * trim_percent)
    kept = sorted(data)[left_out : len(data) - left_out]
    return sum(kept) / len(kept) if kept else 0


class ThroughputTimer:
    """Measures the samples per second of a loop that calls start() and stop() around each step."""

    def __init__(self, batch_size: int = 1, start_step: int = 2, **_: Any) -> None:
        self.batch_size, self.start_step = batch_size, start_step
        self.global_step_count, self.total_elapsed_time = 0, 0.0
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        self.global_step_count += 1
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._since

    def avg_samples_per_sec(self) -> float:
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")
