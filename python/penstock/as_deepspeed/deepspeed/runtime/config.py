"""DeepSpeedConfig: reads a DeepSpeed config and translates it to Penstock's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import types
from collections.abc import Mapping
from typing import Any

import torch

from penstock import ConfigError
from penstock._native import _penstock
from penstock.front import config_file
from penstock.monitor.deepspeed_config import get_monitor_config

from .precision_config import get_bfloat16_config, get_float16_config

SEQUENCE = (
    'set "sequence_parallel_size" and give each rank its tokens; {"mesh": {"sequence": N}} is for '
    "penstock.initialize(), which takes whole sequences (docs/parallel.md)"
)
DeepSpeedConfigError = ConfigError


def as_dict(config: Any) -> dict[str, Any]:
    """Reads a config: a dict, JSON text, a path, or base64 of the text. Comments are allowed.

    HJSON text is read if the package hjson is installed.
    """
    if isinstance(config, Mapping):
        return dict(config)
    text = config_file.text_of(config)
    found: dict[str, Any]
    try:
        found = json.loads(_penstock.plain_json(text))
    except ConfigError as error:
        if "twice" in str(error) or importlib.util.find_spec("hjson") is None:
            raise
        hjson: Any = importlib.import_module("hjson")
        found = hjson.loads(text, object_pairs_hook=config_file.once)
    return found


def make_folder(path: str) -> None:
    """Makes the folder of nvme_path, as DeepSpeed does. Raises ConfigError if that fails."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'[deepspeed::initialize] "nvme_path" is "{path}", and this folder cannot be made: '
            f"{error.strerror}. Set it to a folder that you can write to"
        ) from error


class DeepSpeedConfig:
    """The settings of a config, with the attribute names of DeepSpeed's own class.

    `penstock explain --config ds_config.json` prints every value in effect.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any = None,
        mesh_device: Any = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads and translates the config.

        Args:
            config: see as_dict().
            mpu: sets the number of sequence ranks, if it has any.
            mesh_device: accepted, without effect.
            own: sections of Penstock's config that the model or the mpu sets (stages, tensor
                ranks). Settings in the config have precedence.

        Raises:
            ConfigError: a key or value is wrong or not supported.
        """
        given = as_dict(config)
        self.torch_optimizer = _of_torch(given.get("optimizer"))
        left_out = ("optimizer",) if self.torch_optimizer else ()
        kept = {key: value for key, value in given.items() if key not in left_out}
        kept |= _sequence_ranks(given, mpu)
        text = json.dumps(config_file.finite(kept))
        mesh = (own or {}).get("mesh", {})
        together = mesh.get("pipeline", 1) * mesh.get("tensor", 1)
        self.native, self.translated = config_file.translate(text, config_file.world() // together)
        _refuse_left_over(self.translated.left_over)
        read: dict[str, Any] = json.loads(self.translated.values)
        for section, values in (own or {}).items():
            self.native[section] = {**values, **self.native.get(section, {})}
        resolved = _penstock.Config(self.native).resolved(config_file.world())
        batch = resolved.batch
        self._param_dict, self._values = given, read
        self.monitor_config = get_monitor_config(read)
        self.sequence_parallel_size = self._take_sequence_ranks(batch)
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulate
        self.train_batch_size = batch.global_
        zero = read.get("zero_optimization", {})
        stages = {"ddp": 0, "zero1": 1, "zero2": 2}
        self.zero_optimization_stage = stages.get(str(self.native.get("strategy")), 3)
        self.zero_config = types.SimpleNamespace(**{**zero, "stage": self.zero_optimization_stage})
        self.zero_enabled = self.zero_optimization_stage > 0
        self.bfloat16_enabled = resolved.precision == "bf16"
        self.fp16_enabled = self.float16_enabled = resolved.precision == "fp16"
        self.auto_cast = bool(read.get("fp16", {}).get("auto_cast", False))
        self.gradient_clipping = resolved.clip
        self.steps_per_print = _number(given.get("steps_per_print"))
        self.optimizer_name = (given.get("optimizer", {}).get("type") or "").lower() or None
        self.optimizer_params = given.get("optimizer", {}).get("params")
        self.scheduler_name = read.get("scheduler", {}).get("type")
        self.scheduler_params = read.get("scheduler", {}).get("params")
        self._take_output(read)
        self.managed_gradient_accumulation = read.get("managed_gradient_accumulation", True)
        self.dataloader_drop_last = bool(read.get("dataloader_drop_last", False))

    def _take_output(self, read: dict[str, Any]) -> None:
        """Sets the attributes for logging, and the sections that DeepSpeed's engine has as
        objects."""
        flops = read.get("flops_profiler") or {}
        self.wall_clock_breakdown = bool(
            read.get("wall_clock_breakdown", False) or flops.get("enabled", False)
        )
        self.memory_breakdown = bool(read.get("memory_breakdown", False))
        self.log_level = read.get("log_level")
        self.gradient_allreduce_op = read.get("gradient_allreduce_op", "mean")
        dtypes = read.get("data_types") or {}
        self.grad_accum_dtype = dtypes.get("grad_accum_dtype")
        self.param_dtype, self.buffer_dtype = dtypes.get("param_dtype"), dtypes.get("buffer_dtype")
        self.float16_config = get_float16_config(read)
        self.bfloat16_config = get_bfloat16_config(read)
        made: Any = importlib.import_module("..comm.config", __package__)
        self.comms_logger = made.CommsLoggerConfig(**read.get("comms_logger", {}))

    def _take_sequence_ranks(self, batch: Any) -> int:
        """Returns the number of sequence ranks and removes it from the native config.

        The engine treats sequence ranks as data ranks, since the script cuts its sequences.
        """
        size = int(self.native.get("mesh", {}).pop("sequence", 1))
        if size > 1:
            counts = {"micro": batch.micro, "accumulate": batch.accumulate}
            kept = {key: count for key, count in counts.items() if count}
            self.native["batch"] = {**self.native.get("batch", {}), **kept}
            self.native["batch"].pop("global", None)
        return size

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Prints the config as it was given."""
        print(f"{name}: {json.dumps(config_file.finite(self._param_dict), indent=2)}")


def _sequence_ranks(given: Mapping[str, Any], mpu: Any) -> dict[str, int]:
    """Returns {"sequence_parallel_size": N} of an mpu; {} if it has no sequence ranks."""
    mesh = (given.get("penstock") or {}).get("mesh") or {}
    if "sequence" in mesh:
        raise ConfigError(
            f"[deepspeed::initialize] penstock.mesh.sequence is not supported here: {SEQUENCE}"
        )
    if "sequence" in ((given.get("penstock") or {}).get("parallel") or {}):
        raise ConfigError(
            f"[deepspeed::initialize] penstock.parallel.sequence is not supported here: {SEQUENCE}"
        )
    size = getattr(mpu, "get_sequence_parallel_world_size", None)
    if size is None:
        return {}
    said, key = size(), "sequence_parallel_size"
    if given.get(key) not in (None, "auto", 0, said):
        raise ConfigError(
            f'[deepspeed::initialize] "{key}" is {given[key]}, but the mpu or mesh_param has '
            f"{said} sequence ranks: make them equal"
        )
    return {key: said}


def _refuse_left_over(keys: list[str]) -> None:
    """Refuses keys that are still "auto", if DeepSpeed computes with their values."""
    if keys:
        raise ConfigError(
            f'[deepspeed::initialize] "{keys[0]}" is still "auto": write a '
            f"number, or leave the key out. Trainer and Accelerate replace it before they call "
            f"deepspeed.initialize()"
        )


def _of_torch(section: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and options of a torch.optim class; None if the engine has its kernel."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        return None
    kernels = {kind.name.lower() for kind in _penstock.OPTIMIZER_KINDS}
    made = getattr(torch.optim, name, None)
    if name.lower() in kernels or not isinstance(made, type):
        return None
    if not issubclass(made, torch.optim.Optimizer) or name == "Muon":  # it needs whole matrices
        return None
    params = section.get("params") or {}
    unknown = sorted(params.keys() - inspect.signature(made).parameters)
    if unknown:
        raise ConfigError(
            f'[deepspeed::initialize] "optimizer.params.{unknown[0]}" is not an option of '
            f"torch.optim.{name}; allowed: "
            f"{', '.join([*inspect.signature(made).parameters][1:])}"
        )
    _refuse_left_over(
        [f"optimizer.params.{key}" for key, value in params.items() if value == "auto"]
    )
    return name, dict(params)


def _number(value: Any) -> int:
    """Returns steps_per_print; 0 (print nothing) if it is absent, null or infinite."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
