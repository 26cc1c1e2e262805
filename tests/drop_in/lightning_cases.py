"""What lightnings.py runs. `as`: the case whose losses it must have."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "plain": {"save": True},
    "plain-resumes": {"resume": "plain"},
    "plain-accumulate": {"accumulate": 2},
}
for stage in (1, 2, 3):
    CASES[f"stage{stage}"] = {"options": {"stage": stage}, "as": "plain", "save": True}
CASES |= {
    "stage2-accumulate": {"options": {"stage": 2}, "accumulate": 2, "as": "plain-accumulate"},
    "offload": {
        "options": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        "as": "plain",
    },
    "stage2-resumes": {"options": {"stage": 2}, "resume": "stage2", "as": "plain-resumes"},
    "stage3-resumes": {"options": {"stage": 3}, "resume": "stage3", "as": "plain-resumes"},
    "stage3-bf16": {"options": {"stage": 3}, "precision": "bf16-true"},
}
# Lightning's own strategy, which needs a device that is called "cuda".
ON_CUDA: dict[str, dict[str, Any]] = {
    "as-it-is": {"strategy": "deepspeed_stage_3", "as": "plain"},
}
