"""What accelerated.py runs. `as`: the case whose losses it must have."""

from __future__ import annotations

from typing import Any

_CONFIG = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}

CASES: dict[str, dict[str, Any]] = {"plain": {}, "plain-accumulate": {"accumulate": 2}}
for stage in range(4):
    CASES[f"stage{stage}"] = {"stage": stage, "as": "plain"}
    CASES[f"stage{stage}-accumulate"] = {
        "stage": stage,
        "accumulate": 2,
        "as": "plain-accumulate",
    }
    CASES[f"stage{stage}-config"] = {
        "config": _CONFIG | {"zero_optimization": {"stage": stage}},
        "dummy": True,
    }
CASES |= {
    "offload2": {"stage": 2, "offload_optimizer_device": "cpu", "as": "plain"},
    "offload3": {
        "stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "as": "plain",
    },
    "stage2-saves": {"stage": 2, "save": True, "as": "plain"},
    "stage3-saves": {"stage": 3, "save": True, "as": "plain"},
    "two-plugins": {"stage": 2, "second": 3, "as": "plain"},
}
