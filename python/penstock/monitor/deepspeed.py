"""DeepSpeed's monitors: they write events (name, value, samples) to the sinks in its config.

`MonitorMaster` writes on its own thread; the single monitors write on the calling thread. Names,
files and folders match DeepSpeed 0.19.8; docs/deepspeed.md lists the differences.
"""

from __future__ import annotations

import atexit
import csv
import importlib.util
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from penstock._native import ConfigError, RuntimeFault
from penstock.monitor.deepspeed_config import get_monitor_config
from penstock.monitor.sinks import Sinks, summary_writer, wandb_run

Event = Sequence[Any]  # (name, value, samples[, time in seconds since 1970])

# Config section -> (module that it imports, package name for pip).
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", '"comet_ml>=3.41.0"'),
}


def _rank() -> int:
    """Returns the rank from torch.distributed, or from RANK before a process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _asks(section: str) -> str:
    return f'"{section}.enabled" is true'


def _require(config: Any) -> None:
    """Raises ConfigError if an enabled section's package is not installed.

    It imports nothing, so every rank gets the same result.
    """
    for section, (module, package) in _PACKAGES.items():
        if not getattr(config, section).enabled:
            continue
        loaded = sys.modules.get(module)
        known = module in sys.modules
        if loaded is None if known else importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"[monitor] {_asks(section)}, but its package is not installed: "
                f"pip install {package}"
            )


class Monitor:
    """Base class of one monitor. Only rank 0 writes, and only if the section is enabled.

    Attributes:
        monitor_config: the config section.
        enabled: the section's "enabled", on every rank.
    """

    name = ""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled)
        self._writes = self.enabled and _rank() == 0

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Writes each (name, value, samples) before it returns. No effect on ranks other than 0."""
        if self._writes:
            self._write(event_list)

    def _write(self, events: Iterable[Event]) -> None:
        raise NotImplementedError

    def write(self, events: list[Event], /) -> None:
        self.write_events(events)

    def close(self) -> None: ...


def _folder(section: Any) -> pathlib.Path:
    """Creates the folder output_path/job_name. Raises RuntimeFault if that fails."""
    made = pathlib.Path(section.output_path, section.job_name).absolute()
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFault(f'[monitor] cannot create the folder "{made}": {error}') from None
    return made


class TensorBoardMonitor(Monitor):
    """Writes TensorBoard event files with torch's `summary_writer` (None on ranks above 0)."""

    name = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.output_path = tensorboard_config.output_path
        self.job_name = tensorboard_config.job_name
        self.summary_writer: Any = None
        if self._writes:
            self.summary_writer = summary_writer(_folder(tensorboard_config), _asks("tensorboard"))

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self.summary_writer.add_scalar(*event)
        self.summary_writer.flush()

    def flush(self) -> None:
        if self._writes:
            self.summary_writer.flush()

    def close(self) -> None:
        if self._writes:
            self.summary_writer.close()


class CsvMonitor(Monitor):
    """Writes one CSV file per event name to `log_dir`.

    The columns are "step" and the part of the name after the last "/".
    """

    name = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.filenames: list[str] = []
        self.log_dir = str(_folder(csv_config)) if self._writes else None

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, samples, *_ in events:
            stem = name.replace("/", "_").replace(" ", "_")
            path = pathlib.Path(cast(str, self.log_dir), f"{stem}.csv")
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])
            if stem not in self.filenames:
                self.filenames.append(stem)


class WandbMonitor(Monitor):
    """Logs to a Weights & Biases run.

    If the script has an open run, the monitor uses it and does not finish it.
    """

    name = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group, self.team = wandb_config.group, wandb_config.team
        self.project = wandb_config.project
        self.run: Any = None
        if self._writes:
            self.run = getattr(sys.modules.get("wandb"), "run", None)
            self._ours = self.run is None
        if self._writes and self._ours:
            self.run = wandb_run(
                _asks("wandb"), project=self.project, group=self.group, entity=self.team
            )

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Calls wandb's `Run.log()` on rank 0."""
        if self._writes:
            self.run.log(data, step=step, commit=commit)

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, samples, *_ in events:
            self.log({name: value}, step=samples)

    def close(self) -> None:
        if self._writes and self._ours:
            self.run.finish()


class CometMonitor(Monitor):
    """Logs to a Comet experiment.

    For each name it logs the first event, then at most one per `samples_log_interval` samples.
    """

    name = "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval = comet_config.samples_log_interval
        self.experiment: Any = None
        self._logged: dict[str, int] = {}  # name -> samples at its last logged event
        if not self._writes:
            return
        import comet_ml  # type: ignore[import-not-found]  # noqa: PLC0415

        if not hasattr(comet_ml, "start"):
            version = getattr(comet_ml, "__version__", "(unknown version)")
            package = _PACKAGES["comet"][1]
            raise ConfigError(
                f"[monitor] {_asks('comet')}, but comet_ml {version} has no start(): "
                f"pip install {package}"
            )
        given = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self.experiment = comet_ml.start(**{key: getattr(comet_config, key) for key in given})
        if comet_config.experiment_name is not None:
            self.experiment.set_name(comet_config.experiment_name)

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, samples, *_ in events:
            last = self._logged.get(name)
            if last is None or samples - last >= self.samples_log_interval:
                self._logged[name] = samples
                self.experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        if self._writes:
            self.experiment.end()


class MonitorMaster:
    """All monitors that a config enables.

    Attributes:
        enabled: whether any section is enabled, on every rank.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: the monitors on rank 0. None on
            other ranks and for sections that are not enabled.
    """

    def __init__(self, monitor_config: Any) -> None:
        """Checks the config and opens the monitors on rank 0. All ranks must call it.

        Args:
            monitor_config: the result of get_monitor_config(), or a whole DeepSpeed config as a
                dict.

        Raises:
            ConfigError: a package is not installed; a section has an unknown key or a wrong value.
            RuntimeFault: a folder cannot be created.
        """
        if isinstance(monitor_config, Mapping):
            monitor_config = get_monitor_config(monitor_config)
        self.monitor_config, self.enabled = monitor_config, bool(monitor_config.enabled)
        self.tb_monitor: TensorBoardMonitor | None = None
        self.wandb_monitor: WandbMonitor | None = None
        self.csv_monitor: CsvMonitor | None = None
        self.comet_monitor: CometMonitor | None = None
        self._sinks: Sinks[list[Event]] = Sinks(every=1)
        self._open = False
        _require(monitor_config)
        if self.enabled and _rank() == 0:
            self._begin()

    def _begin(self) -> None:
        config, self._open = self.monitor_config, True
        try:
            if config.tensorboard.enabled:
                self.tb_monitor = TensorBoardMonitor(config.tensorboard)
                self._sinks.add(self.tb_monitor)
            if config.wandb.enabled:
                self.wandb_monitor = WandbMonitor(config.wandb)
                self._sinks.add(self.wandb_monitor)
            if config.csv_monitor.enabled:
                self.csv_monitor = CsvMonitor(config.csv_monitor)
                self._sinks.add(self.csv_monitor)
            if config.comet.enabled:
                self.comet_monitor = CometMonitor(config.comet)
                self._sinks.add(self.comet_monitor)
        except BaseException:
            self.close()
            raise
        # DeepSpeed scripts do not close their monitors. This handler is registered after the
        # libraries' own exit handlers, so it runs before them.
        atexit.register(self.close)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Queues each (name, value, samples) for the writer thread; `close()` waits for it.

        If a monitor raises, the writer thread issues one warning and drops that monitor.
        """
        if not self.enabled or _rank() != 0:
            return
        if not self._open:
            warnings.warn(
                "[monitor] write_events() was called after close(): these events are not written",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        now = time.time()
        self._sinks.put([_kept(*event, now) for event in event_list])

    def close(self) -> None:
        """Writes the queued events and closes the monitors. The engine's close() calls it."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            self._sinks.close()


def _kept(name: str, value: Any, samples: int, *time_s: float) -> Event:
    """Returns the event with its current value: the tensor may change before the write."""
    return name, value.item() if isinstance(value, torch.Tensor) else value, samples, time_s[0]


def step_events(
    samples: int, lr: float, loss_scale: float | None, loss: float | None
) -> list[Event]:
    """Returns DeepSpeed's events for one step.

    Args:
        samples: DeepSpeed's global_samples after the step.
        lr: the learning rate of the next step, as in DeepSpeed.
        loss_scale: the loss scale of the next step, as in DeepSpeed; None without fp16.
        loss: None if unknown.
    """
    told: list[Event] = [("Train/Samples/lr", lr, samples)]
    if loss_scale is not None:
        told.append(("Train/Samples/loss_scale", loss_scale, samples))
    if loss is not None:
        told.append(("Train/Samples/train_loss", loss, samples))
    return told


def time_events(samples: int, times: Sequence[float]) -> list[Event]:
    """Returns DeepSpeed's events for the times of a step, in milliseconds.

    Args:
        samples: DeepSpeed's global_samples after the step.
        times: forward, backward, backward without reduction, reduction, step.
    """
    parts = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    return [
        (f"Train/Samples/elapsed_time_ms_{part}", spent, samples)
        for part, spent in zip(parts, times, strict=True)
    ]


class StepEvents:
    """Sends penstock.Engine's events to the monitors of a DeepSpeed config.

    It does nothing if the config enables no monitor.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._master = MonitorMaster(config)
        self._counted = 0  # samples so far, used if the config does not give samples per step

    def tell(self, engine: Any, applied: bool) -> None:
        """Sends the step's events. Must be called after the step and the scheduler."""
        if not self._master.enabled:
            return
        row = engine.metrics if applied else {}
        self._counted += row.get("samples") or 0
        config = engine.config
        of_steps = int(config.batch.global_) * (engine.steps + engine.skipped_steps)
        scale = engine.loss_scale if config.precision == "fp16" else None
        told = step_events(of_steps or self._counted, engine.lr, scale, row.get("loss"))
        self._master.write_events(told)

    def close(self) -> None:
        self._master.close()
