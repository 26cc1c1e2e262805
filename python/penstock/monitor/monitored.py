"""The part of an engine that is looked at."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import ranks
from penstock.monitor import flops
from penstock.monitor.console import Console
from penstock.monitor.deepspeed import StepEvents
from penstock.monitor.sinks import Callback, Sinks, TensorBoard, Wandb
from penstock.monitor.timelines import Timelines

Row = dict[str, Any]


def batch_size(given: Any) -> tuple[int, int]:
    """Samples and tokens of a model's inputs: the rows of the first tensor, and the elements of the
    first that has whole numbers in two dimensions (`input_ids` before others); 0 where none is."""
    tensors = [value for _, value in sorted(_tensors(given), key=lambda one: one[0] != "input_ids")]
    if not tensors:
        return 0, 0
    first = tensors[0]
    ids = (one for one in tensors if one.dim() == 2 and not one.is_floating_point())
    tokens = next((one.numel() for one in ids if one.dtype != torch.bool), 0)
    return (int(first.shape[0]) if first.dim() else 1), tokens


def _tensors(given: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if torch.is_tensor(given):
        yield name, given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _tensors(value, str(key))
    elif isinstance(given, (tuple, list)):
        for value in given:
            yield from _tensors(value, name)


class Monitored:
    """The part of an engine that says what it does."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _pipeline: Any
    _of_deepspeed: Mapping[str, Any]  # a config
    _peak: float  # FLOP/s of a rank; 0: not known
    _sinks: Sinks[Row]
    _step_events: StepEvents
    _timelines: Timelines

    def _watch(self) -> None:
        """Once there is a core."""
        monitor = self.config.monitor
        self._sinks = Sinks(int(monitor.every))
        self._step_events = StepEvents(self._of_deepspeed)
        self._ended = False
        self._uncounted = bool(monitor.path) or monitor.console != "none"
        if self._uncounted:
            device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
            self._peak = flops.peak(device, self.config.precision or "fp32")
        self._timelines = Timelines(self)
        if ranks.rank() != 0:
            return
        if "tensorboard" in monitor.formats and monitor.path:
            self._sinks.add(TensorBoard(pathlib.Path(monitor.path)))
        if "wandb" in monitor.formats and monitor.path:
            self._sinks.add(Wandb(pathlib.Path(monitor.path), self.config.json()))
        if monitor.console != "none":
            total = int(self.config.schedule.total_steps)
            self._sinks.add(Console(monitor.console, total))

    @property
    def metrics(self) -> Row:
        """Of the last applied step, by the names of docs/monitoring.md; None: not known."""
        return dict(self._core.metrics.last)

    def on_step(self, call: Callable[[Row], None]) -> None:
        """Calls `call(metrics)` after each `monitor.every`-th applied step, on another thread.

        Give it on every rank or on one: it is called where it was given. What it raises is one
        warning, and it is not called again. `close()`, and the end of the process, wait for its
        last call. It runs beside training, so it must not call what all ranks call together.

        Raises:
            ConfigError: it cannot be called.
            RuntimeFault: the engine is closed.
        """
        if not callable(call):
            raise ConfigError(f"[front::on_step] {call!r} cannot be called: give a function")
        if self._ended:
            raise RuntimeFault("[front::on_step] the engine is closed")
        self._sinks.add(Callback(call))

    def trace(
        self, path: str | pathlib.Path, steps: int | None = None, profiler: bool = False
    ) -> None:
        """Writes a timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Args:
            path: the file, made on rank 0.
            steps: the next so many steps, of all ranks, who call this together; it is written when
                the last of them ends. None: what this rank did in the last steps, written now; for
                one rank alone, so give each its own path.
            profiler: torch's profiler runs over these steps on each rank, and its operators (with a
                model on CUDA its kernels, too) are in the file below the rank's lanes.

        A trace that is under way gives way, with a warning. One that has not all of its steps at
        `close()` is a warning, and the file then has what rank 0 did last.

        Raises:
            ConfigError: `monitor.events` is 0; `steps` below 1; `profiler` without `steps`, or
                where one of torch's profilers is running.
            RuntimeFault: the file cannot be written.
        """
        if steps is not None:
            if isinstance(steps, bool) or not isinstance(steps, int):
                raise ConfigError(f"[front::trace] steps is {steps!r}; allowed: a whole number")
            self._timelines.ask(str(path), steps, profiler)
            return
        if profiler:
            raise ConfigError(
                "[front::trace] profiler=True is of steps to come: give steps, such as steps=3"
            )
        self._core.metrics.write_last(str(path))

    # ---- what the engine tells

    def _seen(self, *given: Any) -> contextlib.AbstractContextManager[Any]:
        """The inputs of a forward, which runs in the context. (In a pipeline: of each stage's, and
        `_seen_batch()` has the inputs.)"""
        if not torch.is_grad_enabled() or self._pipeline.active:
            return contextlib.nullcontext()
        self._timelines.before_step()
        if not self.module.training:  # an evaluation
            return contextlib.nullcontext()
        samples, tokens = batch_size(given)
        self._core.metrics.count(samples, tokens)
        if not self._uncounted or samples == 0:
            return contextlib.nullcontext()
        self._uncounted = False
        if flops.hidden(self.module):
            return contextlib.nullcontext()
        return self._counting(samples)

    def _seen_batch(self, parts: list[Any]) -> None:
        self._timelines.before_step()
        for part in parts:
            self._core.metrics.count(*batch_size(part))

    @contextlib.contextmanager
    def _counting(self, samples: int) -> Iterator[None]:
        told = self._core.metrics
        with flops.Counter(lambda: int(told.unit)) as counter:
            yield
        told.set_work([float(counter.by_unit[unit]) for unit in range(len(self._core.units))])
        mesh = self.config.mesh
        copies = int(mesh.tensor * mesh.sequence)  # each has its part of the same samples
        # Of a backward twice a forward's: arXiv:2001.08361, section 2.1.
        self._core.metrics.set_flops(3.0 * counter.total / samples * copies, self._peak)

    def _seen_options(self, optimizer: torch.optim.Optimizer, native: bool) -> None:
        """Of the step that begins. Those of the config are known."""
        if not native and "lr" in optimizer.param_groups[0]:
            self._core.metrics.set_lr(float(optimizer.param_groups[0]["lr"]))

    def _stepped(self) -> None:
        self._timelines.after_step()
        if self._sinks.wanted(int(self._core.steps)):
            self._sinks.put(self.metrics)

    def _end_watch(self) -> None:
        self._ended = True
        if "_timelines" in self.__dict__:
            self._timelines.end()
        if "_sinks" in self.__dict__:
            self._sinks.close()
        if "_step_events" in self.__dict__:
            self._step_events.close()
