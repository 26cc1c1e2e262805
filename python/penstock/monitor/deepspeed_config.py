"""The monitor sections of DeepSpeed's config: tensorboard, csv_monitor, wandb, comet."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock._native import ConfigError, _penstock

_Section = TypeVar("_Section")
_MODES = ("get", "create", "get_or_create")


@dataclasses.dataclass
class TensorBoardConfig:
    """The "tensorboard" section. An `output_path` of "" is the working directory."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclasses.dataclass
class CSVConfig(TensorBoardConfig):
    """The "csv_monitor" section, with the keys of TensorBoardConfig."""


@dataclasses.dataclass
class WandbConfig:
    """The "wandb" section. `team` is passed as wandb's entity."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclasses.dataclass
class CometConfig:
    """The "comet" section. For None, comet_ml uses its own settings."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclasses.dataclass
class DeepSpeedMonitorConfig:
    """All monitor sections. Each may be given as a dict."""

    tensorboard: TensorBoardConfig = dataclasses.field(default_factory=TensorBoardConfig)
    comet: CometConfig = dataclasses.field(default_factory=CometConfig)
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = dataclasses.field(default_factory=CSVConfig)

    def __post_init__(self) -> None:
        self.tensorboard = _section(TensorBoardConfig, "tensorboard", self.tensorboard)
        self.comet = _section(CometConfig, "comet", self.comet)
        self.wandb = _section(WandbConfig, "wandb", self.wandb)
        self.csv_monitor = _section(CSVConfig, "csv_monitor", self.csv_monitor)
        if self.comet.mode not in (None, *_MODES):
            raise ConfigError(
                f'[monitor] "comet.mode" is {self.comet.mode!r}; allowed: {", ".join(_MODES)}'
            )

    @property
    def enabled(self) -> bool:
        return any(getattr(self, one).enabled for one in SECTIONS)


SECTIONS = tuple(one.name for one in dataclasses.fields(DeepSpeedMonitorConfig))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Reads the monitor sections of a whole DeepSpeed config.

    A missing key or "auto" takes the default. Other values are read as DeepSpeed reads them.

    Raises ConfigError for an unknown key in a section or a value of the wrong type.
    """
    given = {one: param_dict[one] for one in SECTIONS if one in param_dict}
    read = _penstock.translate_deepspeed_config(json.dumps(given), 1).values
    return DeepSpeedMonitorConfig(**json.loads(read))


def _left_out(value: Any) -> bool:
    return value is None or value == "auto"


def _section(kind: type[_Section], name: str, given: Any) -> _Section:
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f'[monitor] "{name}" is {given!r}; allowed: a section')
    kinds = typing.get_type_hints(kind)
    kept = {key: one for key, one in given.items() if not _left_out(one)}
    for key, value in kept.items():
        if key not in kinds:
            raise ConfigError(f'[monitor] unknown key "{name}.{key}"; known: {", ".join(kinds)}')
        is_flag = isinstance(value, bool)
        if not isinstance(value, kinds[key]) or (is_flag and kinds[key] is int):
            wanted = getattr(kinds[key], "__name__", str(kinds[key]))
            raise ConfigError(f'[monitor] "{name}.{key}" is {value!r}; allowed: {wanted}')
    return kind(**kept)
