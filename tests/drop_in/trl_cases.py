"""What trl_trainers.py runs: TRL's trainers by ZeRO stage. `as`: the case whose losses it must
have. A case without a stage runs without DeepSpeed, in torch's DDP."""

from __future__ import annotations

from typing import Any

# Variant of a trainer -> what it adds to the case. Each has a run without DeepSpeed.
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": {"trainer": "sft"},
    "sft-lora": {"trainer": "sft", "lora": True},
    "sft-packing": {"trainer": "sft", "options": {"packing": True, "max_length": 24}},
    "dpo": {"trainer": "dpo"},
    "dpo-lora": {"trainer": "dpo", "lora": True},
    "dpo-precompute": {"trainer": "dpo", "options": {"precompute_ref_log_probs": True}},
    "dpo-sync": {
        "trainer": "dpo",
        "options": {
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "ref_model_mixup_alpha": 0.5,
        },
    },
    "kto": {"trainer": "kto"},
    "kto-lora": {"trainer": "kto", "lora": True},
    "reward": {"trainer": "reward"},
    "reward-lora": {"trainer": "reward", "lora": True},
    "grpo": {"trainer": "grpo"},
    "grpo-lora": {"trainer": "grpo", "lora": True},
    "grpo-model": {"trainer": "grpo", "judge": True},
    "rloo": {"trainer": "rloo"},
    "rloo-lora": {"trainer": "rloo", "lora": True},
}
_STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2-offload": {"stage": 2, "offload": True},
    "zero3-offload": {"stage": 3, "offload": True},
}
CASES: dict[str, dict[str, Any]] = {f"plain-{name}": case for name, case in VARIANTS.items()}
CASES |= {
    f"{stage}-{name}": {**case, **place, "as": f"plain-{name}"}
    for stage, place in _STAGES.items()
    for name, case in VARIANTS.items()
}
# Generation layer by layer instead of with all weights gathered.
CASES |= {
    f"zero3-{name}-by-layer": {
        **VARIANTS[name],
        "stage": 3,
        "options": {"ds3_gather_for_generation": False},
        "as": f"plain-{name}",
    }
    for name in ("grpo", "grpo-lora", "rloo")
}
# Settings of Penstock: the parameters of policy and reference model rest in host memory.
SECTION = {"offload": {"params": "host"}, "prefetch_bytes": "1MiB"}
CASES |= {
    f"zero3-{name}-section": {
        **VARIANTS[name],
        "stage": 3,
        "section": SECTION,
        "as": f"plain-{name}",
    }
    for name in ("dpo", "grpo")
}
CASES |= {
    f"zero{stage}-{name}-saves": {
        **VARIANTS[name],
        "stage": stage,
        "save": True,
        "as": f"plain-{name}",
    }
    for stage, name in ((2, "reward"), (3, "reward"), (3, "dpo"), (3, "sft-lora"))
}
_SAMPLE = [
    *("zero3-sft-lora", "zero3-sft-packing", "zero2-dpo", "zero3-dpo-saves"),
    *("zero3-dpo-precompute", "zero3-offload-kto", "zero2-offload-reward"),
    *("zero3-grpo", "zero3-grpo-lora-by-layer", "zero3-rloo-by-layer"),
    *("zero3-dpo-section", "zero3-grpo-section"),
]


def chosen(full: bool) -> list[str]:
    """The cases that run: all, or those that a daily run draws from."""
    return list(CASES) if full else _SAMPLE
