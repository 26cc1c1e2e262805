"""Monitored: the engine's methods for metrics, sinks and traces."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree, ranks
from penstock.monitor import flops
from penstock.monitor.console import Console
from penstock.monitor.deepspeed import StepEvents
from penstock.monitor.sinks import Callback, Sinks, TensorBoard, Wandb
from penstock.monitor.timelines import Timelines

Row = dict[str, Any]


def batch_size(given: Any) -> tuple[int, int]:
    """Returns the numbers of samples and tokens in a model's inputs.

    Samples are the rows of the first tensor. Tokens are the elements of the first 2-D integer
    tensor; `input_ids` has precedence over other names. A number is 0 if there is no such tensor.
    """
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
    """The monitoring part of an engine: metrics, callbacks, traces and FLOP counts."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _pipeline: Any
    _of_deepspeed: Mapping[str, Any]  # the DeepSpeed config, if one was given
    _peak: float  # FLOP/s of a rank; 0 if unknown
    _sinks: Sinks[Row]
    _step_events: StepEvents
    _timelines: Timelines
    _ranks: Any

    def _watch(self) -> None:
        """Creates sinks, step events and timelines. `_core` must exist."""
        monitor = self.config.monitor
        self._sinks = Sinks(int(monitor.every))
        self._step_events = StepEvents(self._of_deepspeed)
        self._ended = False
        self._uncounted = bool(monitor.path) or monitor.console != "none"
        self._by_unit: collections.Counter[int] = collections.Counter()  # FLOPs of own stages
        if self._uncounted:
            device = module_tree.device_of(self.module)
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
        """Metrics of the last applied step, with the names and units of docs/monitoring.md.

        A value is None if it is unknown.
        """
        return dict(self._core.metrics.last)

    def on_step(self, call: Callable[[Row], None]) -> None:
        """Calls `call(metrics)` after each `monitor.every`-th applied step, on another thread.

        Any rank may register a callback; it runs on that rank only. If a callback raises, one
        warning is issued and the callback is not called again. `close()` and the end of the process
        wait for its last call. A callback runs concurrently with training, so it must not call
        collective functions.

        Raises:
            ConfigError: `call` is not callable.
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
            path: the file. Rank 0 writes it, or the calling rank if `steps` is None.
            steps: the number of next steps to trace. All ranks must make this call; the file shows
                all ranks and is written when the last of these steps ends. None: writes this rank's
                last steps at once; give each calling rank its own path.
            profiler: runs torch's profiler over these steps on each rank. Its operators (and its
                kernels, if the model is on CUDA) appear below the rank's lanes.

        A trace that is still in progress is stopped with a warning. If a trace lacks steps at
        `close()`, rank 0 warns, and the file has rank 0's last events.

        Raises:
            ConfigError: `monitor.events` is 0; `steps` is below 1; `profiler` is given without
                `steps`, or while another torch profiler is running.
            RuntimeFault: the file cannot be written.
        """
        if steps is not None:
            if isinstance(steps, bool) or not isinstance(steps, int):
                raise ConfigError(f"[front::trace] steps is {steps!r}; allowed: a whole number")
            if self._ranks.on_first_node():
                self._timelines.ask(str(path), steps, profiler)
            return
        if profiler:
            raise ConfigError(
                "[front::trace] profiler=True needs steps, since it records only future steps: "
                "give steps, such as steps=3"
            )
        self._core.metrics.write_last(str(path))

    # ---- called by the engine

    def _seen(self, *given: Any) -> contextlib.AbstractContextManager[Any]:
        """Records the inputs of a forward; the forward must run inside the returned context.

        In a pipeline this does nothing: `_seen_batch()` records the inputs.
        """
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

    def _seen_stage(self, action: Any) -> contextlib.AbstractContextManager[Any]:
        """Counts the FLOPs of a stage's forward, which must run inside the returned context.

        Counts the first micro-batch alone, once for each stage of this rank.
        """
        counts = self._uncounted and action.micro == 0 and torch.is_grad_enabled()
        if not counts or flops.hidden(self.module):
            return contextlib.nullcontext()
        return self._counting_stage(action)

    @contextlib.contextmanager
    def _counting_stage(self, action: Any) -> Iterator[None]:
        told, pipeline = self._core.metrics, self._pipeline
        # Stand-ins of other stages run operators without values.
        with flops.counter(lambda: -1 if pipeline.inferring else int(told.unit)) as counter:
            yield
        self._by_unit.update({unit: n for unit, n in counter.by_unit.items() if unit >= 0})
        if action.stage + pipeline.ranks.count >= pipeline.ranks.num_stages:  # the rank's last
            self._uncounted = False
            told.set_work([float(self._by_unit[unit]) for unit in range(len(self._core.units))])

    @contextlib.contextmanager
    def _counting(self, samples: int) -> Iterator[None]:
        told = self._core.metrics
        with flops.counter(lambda: int(told.unit)) as counter:
            yield
        told.set_work([float(counter.by_unit[unit]) for unit in range(len(self._core.units))])
        mesh = self.config.mesh
        copies = int(mesh.tensor * mesh.sequence)  # number of ranks that share samples
        # A backward has twice the FLOPs of a forward: arXiv:2001.08361, section 2.1.
        self._core.metrics.set_flops(3.0 * counter.total / samples * copies, self._peak)

    def _seen_options(self, optimizer: torch.optim.Optimizer, native: bool) -> None:
        """Records the learning rate of a user's optimizer for the step that begins.

        The core knows the rate of a native optimizer.
        """
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
