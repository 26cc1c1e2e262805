"""Starts and ends the traces that the user requests from an engine."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import warnings
import weakref
from typing import Any

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree, ranks
from penstock.monitor.profiled import Profile, check_free, running
from penstock.monitor.trace_request import TRACE, Wish, check_folder, of_environment


class _Process:
    """State that all engines of this process share."""

    engines: weakref.WeakSet[Any] = weakref.WeakSet()  # the open engines
    next: Wish | None = None  # the request for the next engine that is created
    named = 0  # traces that the environment has requested so far
    ends = False  # whether _end_all() is registered to run at exit


def _file_of(path: str) -> str:
    """Returns the next engine's trace file: `path` for the first engine, then with a number."""
    _Process.named += 1
    whole = pathlib.Path(path).absolute()
    if _Process.named == 1:
        return str(whole)
    numbered = str(whole.with_name(f"{whole.stem}.{_Process.named}{whole.suffix}"))
    if _Process.named == 2 and ranks.rank() == 0:
        warnings.warn(
            f"[front::trace] {TRACE}: this process has another engine, whose trace is {numbered}; "
            f"the traces of later engines have the next numbers",
            UserWarning,
            stacklevel=2,
        )
    return numbered


class Timelines:
    """The traces of one engine. The engine owns this object."""

    def __init__(self, engine: Any) -> None:
        """Takes the requests from the environment and from trace() before initialize().

        Raises:
            ConfigError: an environment variable has a wrong value.
            RuntimeFault: the trace's folder is missing or not writable (on rank 0).
        """
        self._engine = weakref.ref(engine)
        self._rank = ranks.rank()  # kept, since at exit the process group may be gone
        self._made = 0  # steps so far
        self._waiting: list[Wish] = []  # requests whose first step is in the future
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
            # Registered now, so that it runs before the handlers that were registered on import.
            atexit.register(_end_all)

    def _take(self, wish: Wish, monitor: Any) -> None:
        if monitor.events == 0:
            raise ConfigError(
                f'[front::initialize] {TRACE} is set, but "monitor.events" is 0, so this run '
                f"records no events: remove one of these settings"
            )
        if self._rank == 0:
            check_folder(wish.path)
            if monitor.path and 0 < wish.first < monitor.trace_first + monitor.trace_steps:
                warnings.warn(
                    f'[front::initialize] {TRACE} replaces "monitor.trace_first"',
                    UserWarning,
                    stacklevel=2,
                )
        self._waiting.append(dataclasses.replace(wish, path=_file_of(wish.path)))

    def ask(self, path: str, steps: int, profiler: bool) -> None:
        """Starts a trace of the next `steps` steps. All ranks must call it."""
        if steps < 1:
            raise ConfigError(f"[front::trace] steps is {steps}; allowed: 1 or more")
        self._begin(Wish(path, self._made + 1, self._made + steps, profiler))

    def before_step(self) -> None:
        """Starts the waiting requests before the first step. It is called before each forward."""
        if self._waiting and self._made == 0:
            self._begin_waiting()

    def after_step(self) -> None:
        """Ends the trace after its last step and starts requests that begin with the next step."""
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
            if wish.profiler and running():  # a warning only: an error here would end the run
                _say(
                    f"{_of(wish)} has no events of torch's profiler: another profiler is running, "
                    f"and a process can have only one"
                )
                wish = dataclasses.replace(wish, profiler=False)
            # If the model was called without the engine, before_step() did not run for step 1.
            late = self._made + 1 - wish.first
            self._begin(dataclasses.replace(wish, first=wish.first + late, last=wish.last + late))

    def _begin(self, wish: Wish) -> None:
        """Starts a trace from the next step on. It stops the current one: only one can run."""
        engine: Any = self._engine()
        ours = self._under_way is not None and self._under_way[1] is not None
        if wish.profiler and not ours:
            check_free()  # raises before the current trace is stopped
        self._stop(f"and {wish.path} replaces it")
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
        """Ends the current trace before its last step, with a warning on rank 0."""
        if self._under_way is None:
            return
        (wish, profile), self._under_way = self._under_way, None
        if profile is not None:
            profile.stop()
        if self._rank == 0:
            _say(f"{_of(wish)} is not complete: the last step was {self._made}, {then}")

    def end(self) -> None:
        """Ends all traces and requests. Called at close() or at exit, after the last step."""
        engine = self._engine()
        _Process.engines.discard(engine)
        if self._under_way is not None:
            self._stop(self._rest(engine, self._under_way[0]))
        for wish in self._waiting if self._rank == 0 else []:
            rest = self._rest(engine, wish)
            _say(f"{_of(wish)} has none of these steps: the last step was {self._made}, {rest}")
        self._waiting = []

    def _rest(self, engine: Any, wish: Wish) -> str:
        """Writes rank 0's last events to the trace's file. Returns the text for the warning."""
        if self._rank != 0 or self._made == 0:
            return "and no file is written"
        try:
            engine._core.metrics.write_last(wish.path)
        except RuntimeFault as error:
            return f"and {error}"
        return "and the file has only the last events of rank 0"


def _of(wish: Wish) -> str:
    return f"{wish.asked_by}: {wish.path} of steps {wish.first} to {wish.last}"


def _say(text: str) -> None:
    warnings.warn(f"[front::trace] {text}", RuntimeWarning, stacklevel=4)


def _on_cuda(module: Any) -> bool:
    return module_tree.device_of(module).type == "cuda"


def _nobody_came() -> None:
    if _Process.next is not None:
        _say(f"{_of(_Process.next)} has none of these steps: no engine was created")


def _end_all() -> None:
    """Ends the traces of engines that are still open at exit."""
    for engine in list(_Process.engines):
        if not engine._ranks.copied:
            engine._timelines.end()


def trace(
    path: str | pathlib.Path = "trace.json", steps: int | None = 3, profiler: bool = False
) -> None:
    """Calls `Engine.trace()` of the only open engine, for code that has no reference to it.

    Args:
        path: the file. Rank 0 writes it, or the calling rank if `steps` is None.
        steps: the number of next steps to trace. All ranks must make this call. Before
            `initialize()` these are the first steps of the next engine. None: writes this rank's
            last steps at once.
        profiler: runs torch's profiler over these steps, too.

    Raises:
        ConfigError: several engines are open; no engine is open and `steps` is None; any reason of
            `Engine.trace()`.
        RuntimeFault: the file cannot be written.
    """
    engines = list(_Process.engines)
    if len(engines) > 1:
        raise ConfigError(
            f"[front::trace] {len(engines)} engines are open: call engine.trace() on the one to "
            f"trace"
        )
    if engines:
        engines[0].trace(path, steps, profiler)
        return
    if steps is None:
        raise ConfigError(
            "[front::trace] steps is None, and no engine is open, so there are no last steps to "
            "write: give steps, or call trace() after initialize()"
        )
    if steps < 1:
        raise ConfigError(f"[front::trace] steps is {steps}; allowed: 1 or more")
    if _Process.next is not None:
        _say(f"{_of(_Process.next)} is replaced by {path}")
    _Process.next = Wish(str(path), 1, steps, profiler)
    atexit.unregister(_nobody_came)
    atexit.register(_nobody_came)
