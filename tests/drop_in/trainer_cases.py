"""What trainers.py runs. `as`: the case whose losses it must have."""

from __future__ import annotations

from typing import Any

_STEPS = {"save_strategy": "steps", "save_steps": 3}
_BEST = {
    **_STEPS,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}

CASES: dict[str, dict[str, Any]] = {
    f"plain-{model}": {"model": model} for model in ("gpt2", "llama", "moe")
}
CASES |= {
    f"{config}-{model}": {"config": config, "model": model, "as": f"plain-{model}", "save": True}
    for config in ("zero2", "zero3_offload", "zero3_nvme")
    for model in ("gpt2", "llama", "moe")
}
CASES |= {
    # DeepSpeed's own schedules: compared with DeepSpeed.
    "zero2_offload": {"config": "zero2_offload", "save": True},
    "zero3": {"config": "zero3", "save": True},
    "zero3-fresh": {"config": "zero3", "fresh": True},
    "plain-accumulate": {"arguments": {"gradient_accumulation_steps": 2}},
    "zero2-accumulate": {
        "config": "zero2",
        "arguments": {"gradient_accumulation_steps": 2},
        "as": "plain-accumulate",
    },
    "zero3-accumulate": {
        "config": "zero3_offload",
        "arguments": {"gradient_accumulation_steps": 2},
        "as": "plain-accumulate",
    },
    "zero3-bf16": {"config": "zero3", "arguments": {"bf16": True}},
    "zero2-saves": {"config": "zero2", "arguments": _STEPS, "as": "plain-llama"},
    "zero2-resumes": {"config": "zero2", "resume": "zero2-saves/checkpoint-3", "as": "plain-llama"},
    "zero3-saves": {"config": "zero3", "arguments": _STEPS, "as": "zero3"},
    "zero3-resumes": {"config": "zero3", "resume": "zero3-saves/checkpoint-3", "as": "zero3"},
    "zero2-best": {"config": "zero2", "arguments": _BEST, "as": "plain-llama"},
    "zero3-best": {"config": "zero3", "arguments": _BEST, "as": "zero3"},
    "zero2-only-model": {
        "config": "zero2",
        "arguments": _STEPS | {"save_only_model": True},
        "as": "plain-llama",
    },
    "zero3-not-gathered": {
        "config": "zero3",
        "zero": {"stage3_gather_16bit_weights_on_model_save": False},
        "save": True,
        "as": "zero3",
    },
    "native-zero1": {"native": {"strategy": "zero1"}, "as": "plain-llama", "save": True},
    "native-zero3": {
        "native": {
            "strategy": "zero3",
            "offload": {"optimizer": "host"},
            "activations": {"checkpoint": "unit"},
            "tiling": {"loss_tokens": 16},
        },
        "as": "plain-llama",
        "save": True,
    },
    "plain-lora": {"lora": True},
    "zero2-lora": {"config": "zero2", "lora": True, "as": "plain-lora"},
    "zero3-lora": {
        "config": "zero3_offload",
        "lora": True,
        "arguments": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        "as": "plain-lora",
    },
    "zero2-generates": {"config": "zero2", "generate": True, "as": "plain-llama"},
    "zero3-generates": {"config": "zero3", "generate": True, "as": "zero3"},
}
