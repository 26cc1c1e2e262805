"""What an engine measures and prints while it trains."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from penstock.monitor.deepspeed import time_events

from ..comm.comm import get_rank
from ..profiling.flops_profiler.profiler import FlopsProfiler
from ..utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from .utils import see_memory_usage

# The part of a step -> the timers that run in it. Gradients are reduced while backward runs, so
# "bwd_allreduce" stays 0.
_PARTS = {"forward": ("fwd",), "backward": ("bwd", "bwd_inner"), "step": ("step",)}
_PROFILE = ("module_depth", "top_modules", "detailed", "output_file")
_TIMERS = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")


class EngineClock:
    """The timers, memory lines and FLOPs of wall_clock_breakdown, memory_breakdown and
    flops_profiler.

    Attributes:
        timers: SynchronizedWallClockTimer.
        speed: ThroughputTimer.
        cache: the times of the last micro-batch and window, in milliseconds.
        profiler: the FlopsProfiler, or None if it is off.
    """

    def __init__(self, engine: Any) -> None:
        config = engine._config
        values = config._values
        self._engine: Any = weakref.ref(engine)
        self.timers = SynchronizedWallClockTimer()
        self.speed = ThroughputTimer(batch_size=engine.train_batch_size())
        self.cache: dict[str, float] = {}
        self.profile = values.get("flops_profiler") or {}
        asked = bool(self.profile.get("enabled", False))
        self.profiler = FlopsProfiler(engine.module, engine) if asked else None
        self.times = config.wall_clock_breakdown or asked
        self.micro, self.memory = config.wall_clock_breakdown, config.memory_breakdown
        self.silent = not (self.times or self.memory)
        for name in _TIMERS if self.times else ():
            self.timers(name)
            self.timers(f"{name}_microstep")

    @contextlib.contextmanager
    def around(self, part: str) -> Iterator[None]:
        """Runs the timers of a part, "forward", "backward" or "step"."""
        names = [] if not self.times else [n + s for n in _PARTS[part] for s in ("", "_microstep")]
        if self.memory:
            see_memory_usage(f"Engine before {part}", force=True)
        for name in names:
            self.timers(name).start()
        try:
            yield
        finally:
            for name in names:
                self.timers(name).stop()
            if self.memory:
                see_memory_usage(f"Engine after {part}", force=True)

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Counts the FLOPs of a forward of the step that flops_profiler names, on rank 0."""
        wanted = self.profile.get("profile_step", 1)
        if self.profiler is None or self._engine().global_steps != wanted or get_rank() != 0:
            yield
            return
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()

    def log(self, ends_window: bool) -> None:
        """Prints the times of a micro-batch, and at the end of a window those of the window."""
        engine = self._engine()
        if self.profiler is not None and self.profiler.started:
            told = {key: self.profile[key] for key in _PROFILE if key in self.profile}
            self.profiler.print_model_profile(engine.global_steps, **told)
            self.profiler.end_profile()
        micro = [f"{name}_microstep" for name in _TIMERS]
        if self.micro:
            self.cache = {one: self.timers(one).elapsed(False) for one in (*micro, *_TIMERS)}
            self.timers.log(micro)
        if self.times and ends_window:
            if engine.monitor.enabled:
                times = [self.timers(one).elapsed(False) for one in _TIMERS]
                engine.monitor.write_events(time_events(engine.global_samples, times))
            self.timers.log(_TIMERS)
