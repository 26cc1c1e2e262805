"""What deepspeed.initialize() does before it makes an engine: warnings and the optimizer."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import torch

from penstock import ConfigError
from penstock._native import _penstock
from penstock.front import module_tree
from penstock.front import optimizer as optimizers

from .._refusal import DeepSpeedRefusal
from ..accelerator.real_accelerator import rank_device
from ..comm import comm
from ..comm.comm import get_rank
from ..ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad
from ..ops.adam.cpu_adam import DeepSpeedCPUAdam
from ..ops.adam.fused_adam import FusedAdam
from ..ops.lion.cpu_lion import DeepSpeedCPULion, FusedLion
from ..utils.logging import set_log_level_from_string
from .base_optimizer import ZeROOptimizer
from .config import DeepSpeedConfig

# Keys that this package applies but penstock.Engine ignores; "x." stands for all keys of section x.
_TAKEN_HERE = (
    "steps_per_print", "dataloader_drop_last", "fp16.auto_cast", "wall_clock_breakdown",
    "memory_breakdown", "dump_state", "log_level", "flops_profiler.", "comms_logger.",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "checkpoint.tag_validation", "checkpoint.load_universal",
    "zero_optimization.ignore_unused_parameters",
)  # fmt: skip
_HALF = ("fp16", "float16", "half", "torch.float16")
# The optimizers that DeepSpeed has tested with ZeRO.
_TESTED = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad,
    DeepSpeedCPULion, FusedAdam, FusedLion,
)  # fmt: skip


def warn_of(translated: Any) -> None:
    """Issues one warning on rank 0 that lists all keys without effect, grouped by reason."""
    by_note: dict[str, list[str]] = {}
    for one in translated.given:
        if one.fate == "no effect" and not one.key.startswith(_TAKEN_HERE):
            by_note.setdefault(one.note, []).append(one.key)
    if by_note and get_rank() == 0:
        lines = [f"  {', '.join(keys)}: {note}" for note, keys in by_note.items()]
        warnings.warn(
            "[deepspeed::initialize] keys of the config without effect:\n" + "\n".join(lines),
            UserWarning,
            stacklevel=5,
        )


def _check_tested(config: DeepSpeedConfig, kind: type) -> None:
    """Refuses untested classes if the config says so. By default, any elementwise one may train."""
    allowed = config._values.get("zero_allow_untested_optimizer", True)
    if config.zero_enabled and not allowed and kind not in _TESTED:
        raise DeepSpeedRefusal(
            f"[deepspeed::initialize] {kind.__name__} is not an optimizer that DeepSpeed tested, "
            f'and "zero_allow_untested_optimizer" is false: set it to true'
        )


def _offloads_optimizer(config: DeepSpeedConfig) -> bool:
    return "optimizer" in config.native.get("offload", {})


def _check_given(config: DeepSpeedConfig, given: Any) -> None:
    _check_tested(config, type(given))
    forced = config._values.get("zero_force_ds_cpu_optimizer", False)
    fits = isinstance(given, DeepSpeedCPUAdam | DeepSpeedCPULion)
    if forced and _offloads_optimizer(config) and not fits:
        raise DeepSpeedRefusal(
            f'[deepspeed::initialize] "zero_force_ds_cpu_optimizer" is true, but the optimizer is '
            f"a {type(given).__name__}: pass a DeepSpeedCPUAdam, or set the key to false"
        )


def _class_of(config: DeepSpeedConfig, section: Any) -> tuple[Any, dict[str, Any]]:
    """Returns DeepSpeed's class for the config's optimizer, or None, and options for it."""
    on_cpu, params = _offloads_optimizer(config), config._values["optimizer"].get("params") or {}
    if section.type in ("Adam", "AdamW") and not params.get("torch_adam", False):
        decoupled = section.type == "AdamW"
        if on_cpu:
            return DeepSpeedCPUAdam, {"adamw_mode": decoupled}
        return FusedAdam, {"adam_w_mode": decoupled}
    if section.type == "Lion":
        return (DeepSpeedCPULion if on_cpu else FusedLion), {}
    if section.type == "Adagrad" and on_cpu and not section.lr_decay:
        return DeepSpeedCPUAdagrad, {}
    return None, {}


def optimizer_of(
    config: DeepSpeedConfig, model: torch.nn.Module, given: Any, parameters: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns the torch optimizer (None if there is none) and the native config for it."""
    native = dict(config.native)
    section = native.pop("optimizer", None)
    if isinstance(given, ZeROOptimizer):
        raise DeepSpeedRefusal(
            "[deepspeed::initialize] the given optimizer belongs to another engine: pass a torch "
            "optimizer"
        )
    chosen = [one for one in model.parameters() if one.requires_grad]
    if parameters is not None:
        chosen = list(parameters)
    if given is not None:
        if not isinstance(given, torch.optim.Optimizer) and callable(given):
            given = given(chosen)
        _check_given(config, given)
        low = not getattr(given, "fp32_optimizer_states", True)
        if low or "moments_dtype" in (section or {}):
            native["optimizer"] = {"moments_dtype": "bf16"}
        return given, native
    if config.torch_optimizer is not None:
        name, params = config.torch_optimizer
        _check_tested(config, getattr(torch.optim, name))
        return getattr(torch.optim, name)(chosen, **params), native
    if section is None or "type" not in section:
        return None, native
    if "moments_dtype" in section:
        native["optimizer"] = {"moments_dtype": section.pop("moments_dtype")}
    made = _penstock.Config({"optimizer": section}).optimizer
    optimizer = optimizers.build(made, chosen, *_class_of(config, made))
    _check_tested(config, type(optimizer))
    return optimizer, native


def dtypes_of_buffers(config: DeepSpeedConfig, model: torch.nn.Module) -> dict[str, Any]:
    """Returns {"dtypes": rules} with a rule for each floating buffer; {} if it keeps its dtype.

    As in DeepSpeed, "data_types.buffer_dtype" has no effect without fp16 and bf16. Rules of the
    section "penstock" come first.
    """
    if config.buffer_dtype is None or not (config.fp16_enabled or config.bfloat16_enabled):
        return {}
    dtype, given = _short(config.buffer_dtype), config.native.get("dtypes", {})
    rules = {
        re.sub(r"([*?\[\]\\])", r"\\\1", name): dtype  # a name may look like a pattern
        for name, buffer in module_tree.named_buffers_of(model)
        if buffer.is_floating_point()
    }
    return {"dtypes": {**given, **rules, **given}}


def _short(dtype: str) -> str:
    """Returns Penstock's name of a dtype in a config."""
    return "bf16" if "bf" in dtype else "fp16" if dtype in _HALF else "fp32"


def device_of(args: Any) -> torch.device:
    """Returns the device on which this rank trains: number `args.device_rank`, if it is set."""
    number = getattr(args, "device_rank", None)
    return rank_device(None if number is None or int(number) < 0 else int(number))


def check_arguments(engine: Any, reduction: str) -> None:
    """Refuses what DeepSpeed refuses, and summed gradients in a pipeline."""
    is_made = isinstance(engine.client_lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if is_made and not isinstance(engine.client_optimizer, torch.optim.Optimizer):
        raise DeepSpeedRefusal(
            "[deepspeed::initialize] a scheduler object needs the optimizer object that it "
            "was made for: pass both, or a callable that makes the scheduler"
        )
    if engine._config.gradient_allreduce_op == "sum" and reduction != "sum":
        raise ConfigError(
            '[deepspeed::initialize] "gradient_allreduce_op" is "sum", which is not supported '
            "with a PipelineModule: multiply the loss by the number of data ranks"
        )
    unmanaged = not engine._config.managed_gradient_accumulation
    if unmanaged and engine._config.zero_optimization_stage < 2 and engine.zero_overlap_comm():
        raise DeepSpeedRefusal(
            '[deepspeed::initialize] if "managed_gradient_accumulation" is false, overlap_comm is '
            "supported only with ZeRO stage 2 and 3, as in DeepSpeed: remove overlap_comm"
        )
    named, own = engine._config.grad_accum_dtype, engine._config.native.get("precision", "fp32")
    held = _short(named or own)
    if named is not None and engine._config.zero_optimization_stage == 0 and held != own:
        raise DeepSpeedRefusal(
            f'[deepspeed::initialize] "data_types.grad_accum_dtype" is "{named}"; allowed at '
            f"stage 0: {own}, as in DeepSpeed"
        )


def say_setup(engine: Any) -> None:
    """Applies the keys dump_state, log_level and comms_logger."""
    if engine._config.log_level is not None:
        set_log_level_from_string(engine._config.log_level)
    if engine._config.comms_logger.enabled:
        comm.configure(engine._config)
    if engine.dump_state() and engine.global_rank == 0:
        print(json.dumps(json.loads(engine.native.config.json()), indent=2))
