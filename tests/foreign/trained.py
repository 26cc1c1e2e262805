"""The model that foreign checkpoints are of, and its data: the same for whoever trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BEFORE, AFTER = 3, 3
GROUPS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
SCHEDULE: dict[str, Any] = {"step_size": 2, "gamma": 0.5}

# Of DeepSpeed, by folder: "zero_optimization". The precision ends the name.
CASES: dict[str, dict[str, Any]] = {
    "zero1-fp32": {"stage": 1},
    "zero1-fp16": {"stage": 1},
    "zero2-fp32": {"stage": 2},
    "zero2-bf16": {"stage": 2, "round_robin_gradients": True},
    "zero3-fp32": {"stage": 3, "sub_group_size": 30},
    "zero3-bf16": {"stage": 3},
}


class Model(nn.Module):
    """Tied weights, a frozen one, buffers (one of whole numbers), sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 7)
        self.back = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0, 2.0, 1.0, 1.0]))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.frozen(self.embed(tokens[:, :-1]))
        hidden = self.norm(hidden * self.scale.to(hidden.dtype))
        hidden = hidden + self.back(F.gelu(self.hidden(hidden)))
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (4, 8), generator=generator)


def config(case: str) -> dict[str, Any]:
    """DeepSpeed's config of a case."""
    precision = case.partition("-")[2]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
        "zero_optimization": CASES[case] | {"stage3_param_persistence_threshold": 0},
    }
