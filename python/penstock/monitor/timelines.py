"""Timelines that somebody asked an engine for: what they are of, and what becomes of them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import warnings
import weakref
from typing import Any

from penstock._native import ConfigError, RuntimeFault
from penstock.front import ranks
from penstock.monitor.profiled import Profile, check_free, running
from penstock.monitor.trace_request import TRACE, Wish, check_folder, of_environment


class _Process:
    """What the engines of this process have in common."""

    engines: weakref.WeakSet[Any] = weakref.WeakSet()  # open ones
    next: Wish | None = None  # of the engine that is made next
    named = 0  # traces by the environment
    ends = False  # at exit


def _file_of(path: str) -> str:
    """For one more engine that the environment asks a trace of."""
    _Process.named += 1
    whole = pathlib.Path(path).absolute()
    if _Process.named == 1:
        return str(whole)
    numbered = str(whole.with_name(f"{whole.stem}.{_Process.named}{whole.suffix}"))
    if _Process.named == 2 and ranks.rank() == 0:
        warnings.warn(
            f"[front::trace] {TRACE}: this process has another engine, whose trace is {numbered}; "
            f"later ones have the next numbers",
            UserWarning,
            stacklevel=2,
        )
    return numbered


class Timelines:
    """Those of one engine, which it belongs to."""

    def __init__(self, engine: Any) -> None:
        """Takes what waits for an engine. Raises ConfigError for wrong values in the environment,
        RuntimeFault on rank 0 for a folder that is not there."""
        self._engine = weakref.ref(engine)
        self._rank = ranks.rank()  # at exit nobody may know
        self._made = 0  # steps
        self._waiting: list[Wish] = []  # for their first step
        self._under_way: tuple[Wish, Profile | None] | None = None
        wish = of_environment(os.environ)
        if wish is not None:
            self._take(wish, engine.config.monitor)
        if _Process.next is not None:
            self._waiting.append(_Process.next)
            _Process.next = None
        _Process.engines.add(engine)
        if not _Process.ends:
            _Process.ends = True
            # Now, so that it comes before what was registered on import.
            atexit.register(_end_all)

    def _take(self, wish: Wish, monitor: Any) -> None:
        if monitor.events == 0:
            raise ConfigError(
                f'[front::initialize] {TRACE} is set and "monitor.events" is 0: nothing of this '
                f"run is recorded; drop one of them"
            )
        if self._rank == 0:
            check_folder(wish.path)
            if monitor.path and 0 < wish.first < monitor.trace_first + monitor.trace_steps:
                warnings.warn(
                    f'[front::initialize] {TRACE} takes the place of "monitor.trace_first"',
                    UserWarning,
                    stacklevel=2,
                )
        self._waiting.append(dataclasses.replace(wish, path=_file_of(wish.path)))

    def ask(self, path: str, steps: int, profiler: bool) -> None:
        """Of the next steps. All ranks call it."""
        if steps < 1:
            raise ConfigError(f"[front::trace] steps is {steps}; allowed: 1 or more")
        self._begin(Wish(path, self._made + 1, self._made + steps, profiler))

    def before_step(self) -> None:
        """A forward of the first step is about to run: it begins what was asked for before."""
        if self._waiting and self._made == 0:
            self._begin_waiting()

    def after_step(self) -> None:
        """One was applied."""
        self._made += 1
        if self._under_way is not None and self._made >= self._under_way[0].last:
            (_, profile), self._under_way = self._under_way, None
            if profile is not None:
                profile.stop()
        if self._waiting:
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        due = [wish for wish in self._waiting if wish.first <= self._made + 1]
        self._waiting = [wish for wish in self._waiting if wish not in due]
        for wish in due:
            if wish.profiler and running():  # this is in the middle of a run: no error ends it
                _say(
                    f"{_of(wish)} has nothing of torch's profiler: another one is running, and a "
                    f"process has one"
                )
                wish = dataclasses.replace(wish, profiler=False)
            # Where the model was called by itself the first step was not seen to begin.
            late = self._made + 1 - wish.first
            self._begin(dataclasses.replace(wish, first=wish.first + late, last=wish.last + late))

    def _begin(self, wish: Wish) -> None:
        """From the next step on. What is under way gives way: there is one at a time."""
        engine: Any = self._engine()
        ours = self._under_way is not None and self._under_way[1] is not None
        if wish.profiler and not ours:
            check_free()  # before another trace gives way
        self._stop(f"and it gives way to {wish.path}")
        profile = Profile(_on_cuda(engine.module)) if wish.profiler else None
        steps = wish.last - self._made
        try:
            if profile is None:
                engine._core.metrics.trace(wish.path, steps)
            else:
                engine._core.metrics.trace(wish.path, steps, profile.text)
        except BaseException:
            if profile is not None:
                profile.stop()
            raise
        self._under_way = wish, profile

    def _stop(self, then: str) -> None:
        """Ends what is under way before its last step."""
        if self._under_way is None:
            return
        (wish, profile), self._under_way = self._under_way, None
        if profile is not None:
            profile.stop()
        if self._rank == 0:
            _say(f"{_of(wish)} is not complete: the last step was {self._made}, {then}")

    def end(self) -> None:
        """No step comes any more."""
        engine = self._engine()
        _Process.engines.discard(engine)
        if self._under_way is not None:
            self._stop(self._rest(engine, self._under_way[0]))
        for wish in self._waiting if self._rank == 0 else []:
            rest = self._rest(engine, wish)
            _say(f"{_of(wish)} has none of them: the last step was {self._made}, {rest}")
        self._waiting = []

    def _rest(self, engine: Any, wish: Wish) -> str:
        """Writes what rank 0 has, and tells of it."""
        if self._rank != 0 or self._made == 0:
            return "and no file is written"
        try:
            engine._core.metrics.write_last(wish.path)
        except RuntimeFault as error:
            return f"and {error}"
        return "and the file has what rank 0 alone did last"


def _of(wish: Wish) -> str:
    return f"{wish.asked_by}: {wish.path} of steps {wish.first} to {wish.last}"


def _say(text: str) -> None:
    warnings.warn(f"[front::trace] {text}", RuntimeWarning, stacklevel=4)


def _on_cuda(module: Any) -> bool:
    return any(param.device.type == "cuda" for param in module.parameters())


def _nobody_came() -> None:
    if _Process.next is not None:
        _say(f"{_of(_Process.next)} has none of them: no engine was made")


def _end_all() -> None:
    """At exit, of engines that nobody closed."""
    for engine in list(_Process.engines):
        engine._timelines.end()


def trace(
    path: str | pathlib.Path = "trace.json", steps: int | None = 3, profiler: bool = False
) -> None:
    """`Engine.trace()` of the one open engine of this process, for where it is not at hand.

    Args:
        path: the file, made on rank 0.
        steps: the next so many steps, of all ranks, who call this together. Before `initialize()`:
            the first so many steps of the engine that is made next. None: what this rank did in the
            last steps, written now.
        profiler: torch's profiler runs over these steps, too.

    Raises:
        ConfigError: several engines are open; none is, and `steps` is None; as `Engine.trace()`.
        RuntimeFault: the file cannot be written.
    """
    engines = list(_Process.engines)
    if len(engines) > 1:
        raise ConfigError(
            f"[front::trace] {len(engines)} engines are open: call engine.trace() of the one that "
            f"is meant"
        )
    if engines:
        engines[0].trace(path, steps, profiler)
        return
    if steps is None:
        raise ConfigError(
            "[front::trace] steps is None, and no engine is open whose last steps could be "
            "written: give steps, or call it after initialize()"
        )
    if steps < 1:
        raise ConfigError(f"[front::trace] steps is {steps}; allowed: 1 or more")
    if _Process.next is not None:
        _say(f"{_of(_Process.next)} gives way to {path}")
    _Process.next = Wish(str(path), 1, steps, profiler)
    atexit.unregister(_nobody_came)
    atexit.register(_nobody_came)
