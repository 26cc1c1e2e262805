"""Monitors as DeepSpeed has them: events (name, value, samples) go where its config says.

`MonitorMaster` writes from a thread of its own, its parts from the thread that calls them. Names,
files and folders are those of DeepSpeed 0.19.8; what differs is in docs/deepspeed.md.
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

Event = Sequence[Any]  # (name, value, samples); a fourth is the time, in seconds since 1970

# What a section needs, and what pip calls it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", '"comet_ml>=3.41.0"'),
}


def _rank() -> int:
    """Also where the launcher's environment alone says it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _asks(section: str) -> str:
    return f'"{section}.enabled" is true'


def _require(config: Any) -> None:
    """On every rank alike: nothing is imported."""
    for section, (module, package) in _PACKAGES.items():
        if not getattr(config, section).enabled:
            continue
        loaded = sys.modules.get(module)
        known = module in sys.modules
        if loaded is None if known else importlib.util.find_spec(module) is None:
            raise ConfigError(f"[monitor] {_asks(section)}: pip install {package}")


class Monitor:
    """One place. Rank 0 writes, where the section is enabled.

    Attributes:
        monitor_config: the section.
        enabled: as it says, on every rank.
    """

    name = ""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled)
        self._writes = self.enabled and _rank() == 0

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Writes each (name, value, samples) now."""
        if self._writes:
            self._write(event_list)

    def _write(self, events: Iterable[Event]) -> None:
        raise NotImplementedError

    def write(self, events: list[Event], /) -> None:
        self.write_events(events)

    def close(self) -> None: ...


def _folder(section: Any) -> pathlib.Path:
    """output_path/job_name, made."""
    made = pathlib.Path(section.output_path, section.job_name).absolute()
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFault(f'[monitor] the folder "{made}" cannot be made: {error}') from None
    return made


class TensorBoardMonitor(Monitor):
    """TensorBoard's event files, by torch's `summary_writer` (None on other ranks than 0)."""

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
    """A file for each name in `log_dir`, with columns "step" and the name's last part."""

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
    """A run of Weights & Biases: the script's own where it has one, which stays open then."""

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
        """As wandb.log()."""
        if self._writes:
            self.run.log(data, step=step, commit=commit)

    def _write(self, events: Iterable[Event]) -> None:
        for name, value, samples, *_ in events:
            self.log({name: value}, step=samples)

    def close(self) -> None:
        if self._writes and self._ours:
            self.run.finish()


class CometMonitor(Monitor):
    """An experiment of Comet. Of each name the first event, then one after every
    `samples_log_interval` samples."""

    name = "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval = comet_config.samples_log_interval
        self.experiment: Any = None
        self._logged: dict[str, int] = {}  # samples, by name
        if not self._writes:
            return
        import comet_ml  # type: ignore[import-not-found]  # noqa: PLC0415

        if not hasattr(comet_ml, "start"):
            version = getattr(comet_ml, "__version__", "an old one")
            package = _PACKAGES["comet"][1]
            raise ConfigError(
                f"[monitor] {_asks('comet')}: pip install {package} (it is {version})"
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
    """All places that a config enables.

    Attributes:
        enabled: whether there is any, on every rank.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: on rank 0; None where not enabled.
    """

    def __init__(self, monitor_config: Any) -> None:
        """All ranks make one together.

        Args:
            monitor_config: of get_monitor_config(), or a whole config as a dict.

        Raises:
            ConfigError: a package that is not installed; a section with what it cannot have.
            RuntimeFault: a folder that cannot be made.
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
        # Scripts of DeepSpeed end without a word. After those of the libraries, so it runs first.
        atexit.register(self.close)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Hands on each (name, value, samples); `close()` waits until they are written. What a
        place raises then is one warning, and the end of that place."""
        if not self.enabled or _rank() != 0:
            return
        if not self._open:
            warnings.warn(
                "[monitor] events after the end of the engine are not written",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        now = time.time()
        self._sinks.put([_kept(*event, now) for event in event_list])

    def close(self) -> None:
        """Writes what waits, and lets go of the places. The engine's end calls it."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            self._sinks.close()


def _kept(name: str, value: Any, samples: int, *time_s: float) -> Event:
    """As it is now: tensors change."""
    return name, value.item() if isinstance(value, torch.Tensor) else value, samples, time_s[0]


def step_events(
    samples: int, lr: float, loss_scale: float | None, loss: float | None
) -> list[Event]:
    """Of one step, at DeepSpeed's global_samples after it. `loss_scale`: with fp16; `loss`: where
    it is known. `lr` and `loss_scale` are the next step's, as there."""
    told: list[Event] = [("Train/Samples/lr", lr, samples)]
    if loss_scale is not None:
        told.append(("Train/Samples/loss_scale", loss_scale, samples))
    if loss is not None:
        told.append(("Train/Samples/train_loss", loss, samples))
    return told


class StepEvents:
    """What penstock.Engine tells the monitors of a DeepSpeed config; nothing where it has none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._master = MonitorMaster(config)
        self._counted = 0  # samples, where the config does not say how many a step has

    def tell(self, engine: Any, applied: bool) -> None:
        """After a step, and after the scheduler."""
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
