"""Penstock's own settings in Transformers' Trainer and in Accelerate.

    import penstock.hf
    config = penstock.hf.config(strategy="zero3", offload={"optimizer": "host"})
    args = TrainingArguments(..., deepspeed=config)      # or DeepSpeedPlugin(hf_ds_config=config)

Both use Penstock through their support for DeepSpeed: importing this module calls
penstock.deepspeed.install().
"""

from __future__ import annotations

from typing import Any

from penstock import deepspeed as as_deepspeed
from penstock._native import ConfigError

as_deepspeed.install()

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2}
# Penstock's keys that the frameworks set -> the frameworks' options for them.
_THEIRS = {
    "batch": "per_device_train_batch_size and gradient_accumulation_steps",
    "clip": "max_grad_norm",
    "optimizer": "optim, learning_rate and weight_decay",
    "schedule": "lr_scheduler_type",
    "precision": "bf16 or fp16",
}


def config(strategy: str = "zero3", **native: Any) -> dict[str, Any]:
    """Returns a config for `TrainingArguments(deepspeed=)` and `DeepSpeedPlugin(hf_ds_config=)`.

    Args:
        strategy: as in docs/config.md.
        native: other keys of docs/config.md: `offload`, `tiling`, `activations`, `dtypes`, ...

    Raises:
        ConfigError: if the framework sets a key of `native`.
    """
    for key, said in _THEIRS.items():
        if key in native:
            raise ConfigError(
                f'[hf::config] the framework sets "{key}". Use its options instead: {said}'
            )
    return {
        "zero_optimization": {
            "stage": _STAGES.get(strategy, 3),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "penstock": {"strategy": strategy, **native},
    }


__all__ = ["config"]
