"""What the drop-in makes of a DeepSpeed config, and where it differs from DeepSpeed on purpose.

tests/weekly/deepspeed_configs.py and test_config_outcomes.py use it. An outcome is a dict: "error"
(text), or "values", the settings in effect. As a script it reads configs from stdin, one per line,
and prints their outcomes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import penstock.deepspeed

WORLD = 2
Outcome = dict[str, Any]
# Settings of the zero section: the engine's method and DeepSpeed's field.
ZERO = {
    "zero_reduce_bucket_size": "reduce_bucket_size",
    "zero_allgather_bucket_size": "allgather_bucket_size",
    "zero_sub_group_size": "sub_group_size",
    "zero_prefetch_bucket_size": "prefetch_bucket_size",
    "zero_param_persistence_threshold": "param_persistence_threshold",
    "zero_max_live_parameters": "max_live_parameters",
    "zero_max_reuse_distance": "max_reuse_distance",
    "zero_reduce_scatter": "reduce_scatter",
    "zero_overlap_comm": "overlap_comm",
    "zero_contiguous_gradients": "contiguous_gradients",
    "zero_round_robin_gradients": "round_robin_gradients",
    "zero_ignore_unused_parameters": "ignore_unused_parameters",
    "zero_elastic_checkpoint": "elastic_checkpoint",
    "zero_load_from_fp32_weights": "load_from_fp32_weights",
    "zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_gather_16bit_weights_on_model_save": "gather_16bit_weights_on_model_save",
}
# What a framework writes where these keys are "auto"; other keys stay "auto".
FILLED = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 2,
    "total_num_steps": 10,
}
_DEVICES = {"host": "cpu", "disk": "nvme"}


def _values(config: Any, settings: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    native = config.native
    offload = native.get("offload", {})
    scale = native.get("loss_scale")
    monitors = config.monitor_config
    return {
        "batch": [
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        ],
        "stage": config.zero_optimization_stage,
        "bf16": config.bfloat16_enabled,
        "fp16": config.fp16_enabled,
        "clip": native["clip"],
        "scale": scale and [scale["initial"], scale["window"]],
        "offload": [_DEVICES.get(offload.get(role)) for role in ("optimizer", "params")],
        "optimizer": config.optimizer_name,
        "scheduler": config.scheduler_name,
        "monitors": [
            monitors.csv_monitor.enabled,
            monitors.comet.enabled,
            monitors.comet.samples_log_interval,
        ],
        **{field: settings[name](config) for name, field in ZERO.items()},
    }


def filled(section: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the config with the values of a framework in place of "auto"."""
    values = FILLED | changes
    return {
        key: filled(value, **changes)
        if isinstance(value, dict)
        else values.get(key, value)
        if value == "auto"
        else value
        for key, value in section.items()
    }


def ours(config: dict[str, Any]) -> Outcome:
    """Reads the config as deepspeed.initialize() does on WORLD ranks."""
    penstock.deepspeed.install()
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415 - the drop-in's
    from deepspeed.runtime.engine_settings import _GETTERS  # noqa: PLC0415

    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(WORLD)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"values": json.loads(json.dumps(_values(DeepSpeedConfig(config), _GETTERS)))}
    except penstock.ConfigError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the comparison reports it
        return {"crash": repr(error)}
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


@dataclass
class Difference:
    """A documented difference."""

    refuses: str  # "penstock" or "deepspeed"
    error: str  # a pattern
    reason: str
    example: dict[str, Any]  # a config, beside BATCH


BATCH = {"train_micro_batch_size_per_gpu": 2}
DIFFERENCES = (
    Difference(
        "penstock",
        "which is not supported",
        "a feature that Penstock does not have",
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
    ),
    Difference(
        "penstock",
        "write the config in one dialect",
        "a native key beside DeepSpeed's",
        {"seed": 1},
    ),
    Difference(
        "penstock",
        r'unknown key "(optimizer|data_types|torch_autocast|pipeline|[a-z_]+\.zeropp_loco_param)\.',
        "DeepSpeed ignores an unknown key of a dict, which may be a spelling mistake",
        {"optimizer": {"typ": "Adam"}},
    ),
    Difference(
        "penstock",
        r'"(train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps)" is '
        r"-?[\d.e+]+; allowed: a whole number",
        "DeepSpeed accepts half a sample if the product is right; a loader then fails",
        {"train_micro_batch_size_per_gpu": 2.5},
    ),
    Difference(
        "penstock",
        '"gradient_clipping" is (?!still|"auto")',
        "DeepSpeed fails in the first step",
        {"gradient_clipping": "1.0"},
    ),
    Difference(
        "penstock",
        r'"optimizer\.(type|params[\w.]*)" is (?!still|"auto")|"optimizer\.\w+" is |has no "',
        "DeepSpeed fails when it makes the optimizer",
        {"optimizer": {"type": "Adam", "params": {"lr": "fast"}}},
    ),
    Difference(
        "penstock",
        r'"scheduler\.\w+" is ',
        "DeepSpeed fails when it makes the scheduler",
        {"scheduler": {"type": 1}},
    ),
    Difference(
        "penstock",
        r'((optimizer|scheduler)\.params\.[\w.]+|"gradient_clipping)" is still "auto"',
        "DeepSpeed fails when it uses the number",
        {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
    ),
    Difference(
        "penstock",
        r'"(wall_clock_breakdown|managed_gradient_accumulation|flops_profiler.enabled)" is .*; '
        "allowed: true or false",
        "DeepSpeed takes any value for a flag",
        {"managed_gradient_accumulation": None},
    ),
    Difference(
        "penstock",
        r'"batch.global" is .* 1 data-parallel ranks',
        "DeepSpeed's parser counts tensor ranks as data ranks",
        {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "tensor_parallel": {"autotp_size": 2},
        },
    ),
    Difference(
        "penstock",
        r'"vocabulary_size" is (""|\[\]|\{\})',
        "DeepSpeed takes an empty text for no number",
        {"vocabulary_size": ""},
    ),
    Difference(
        "penstock",
        r'"data_types\.(grad_accum|param)_dtype" is ',
        "DeepSpeed fails when it makes the optimizer",
        {"data_types": {"grad_accum_dtype": "double"}},
    ),
    Difference(
        "penstock",
        '"comet.mode" is ',
        "comet_ml fails when it starts",
        {"comet": {"mode": "update"}},
    ),
    Difference(
        "penstock",
        "no nvme_path",
        "DeepSpeed fails when it makes its swap files",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
    Difference(
        "penstock",
        "share one folder",
        "there is one disk tier",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            }
        },
    ),
    Difference(
        "penstock",
        "a divisor of the number of|allowed: 1, or autotp_size",
        "DeepSpeed fails when it makes groups",
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
    ),
    Difference(
        "penstock",
        '"(fp16.initial_scale_power|fp16.loss_scale)" is ',
        "such a scale overflows or vanishes in fp16",
        {"fp16": {"enabled": True, "initial_scale_power": 50}},
    ),
    Difference(
        "deepspeed",
        "(has|have) been removed|no longer",
        "keys of older versions are read",
        {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
    ),
    Difference(
        "deepspeed",
        "Either train_batch_size or",
        "the engine needs no batch size",
        {"train_micro_batch_size_per_gpu": None},
    ),
    Difference(
        "deepspeed",
        "cpu_offload_params",
        "a key of older versions",
        {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
    ),
    Difference(
        "deepspeed",
        "bf16_optimizer_states",
        "moments in bf16 need no master in bf16",
        {
            "bf16": {"enabled": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 1},
        },
    ),
    Difference(
        "deepspeed",
        "WeightQuantConfig|CompileConfig|keep_in_fp32_modules must be",
        'false, 0, null and "none" all turn off a feature that Penstock does not have',
        {"data_types": {"keep_in_fp32_modules": False}},
    ),
    Difference(
        "deepspeed",
        r"unsupported operand type.*\|.*'float'",
        "1.0 is a flag, as in the other sections",
        {"wall_clock_breakdown": 1.0},
    ),
    Difference(
        "deepspeed",
        "ZeroDivisionError",
        "a sequence_parallel_size of 0 is the same as 1",
        {"sequence_parallel_size": 0},
    ),
    Difference(
        "deepspeed",
        "GDS currently only",
        "the disk tier has no GDS; the key has no effect",
        {"aio": {"use_gds": True}},
    ),
    Difference(
        "deepspeed",
        "TPTrainingConfig\ndtype",
        "a dtype in JSON is text; the key has no effect",
        {"tensor_parallel": {"dtype": "bf16"}},
    ),
)


def difference(theirs: Outcome, ours: Outcome) -> Difference | str | None:
    """Compares two outcomes: None if they are the same, the documented difference, or a text."""
    if "crash" in ours:
        return ours["crash"]
    if ("error" in theirs) == ("error" in ours):
        if "error" in ours:
            return None
        kept = dict(theirs["values"])
        if kept["stage"] < 3:  # DeepSpeed keeps offload_param, and does not use it
            kept["offload"] = [kept["offload"][0], None]
        other = {
            key: (value, ours["values"][key])
            for key, value in kept.items()
            if ours["values"][key] != value
        }
        return f"values (DeepSpeed's, ours): {other}" if other else None
    side, text = ("penstock", ours["error"]) if "error" in ours else ("deepspeed", theirs["error"])
    for one in DIFFERENCES:
        if one.refuses == side and re.search(one.error, text):
            return one
    return f"only {side} refuses: {text}"


def main() -> None:
    for line in sys.stdin:
        print("OUTCOME " + json.dumps(ours(json.loads(line))))


if __name__ == "__main__":
    main()
