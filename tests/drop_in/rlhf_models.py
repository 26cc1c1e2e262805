"""Models, data and formulas of rlhf_loops.py: tiny Llamas, a value head, LoRA by hand, PPO."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.integrations.deepspeed import HfDeepSpeedConfig

VOCAB, WIDTH, ROWS, PROMPT, ANSWER = 45, 32, 2, 5, 6
END = 1


def write_models(folder: pathlib.Path) -> None:
    """Saves a policy and, as "base", a model without a head."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=END,
    )
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "policy")
    transformers.LlamaModel(config).save_pretrained(folder / "base")


def is_sharded(ds: Any, config: dict[str, Any]) -> bool:
    return config["zero_optimization"]["stage"] == 3 and not hasattr(ds, "PLAIN")


def pretrained(ds: Any, kind: Any, place: pathlib.Path, config: dict[str, Any]) -> Any:
    """The model of a folder. ZeRO-3 shards it while it is built, because Transformers knows of the
    config as long as `known` exists."""
    known = HfDeepSpeedConfig(config) if is_sharded(ds, config) else None
    model = kind.from_pretrained(place)
    del known
    return model


def policy(ds: Any, folder: pathlib.Path, config: dict[str, Any]) -> Any:
    return pretrained(ds, transformers.AutoModelForCausalLM, folder / "policy", config)


class Scored(nn.Module):
    """A model with a value head, trained on pairs: the first half of a batch is better."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.config = base.config
        self.v_head = nn.Linear(WIDTH, 1, bias=False)
        self.base = base

    def values(self, ids: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.base(ids, use_cache=False)[0]).squeeze(-1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        better, worse = self.values(ids).chunk(2)
        return -functional.logsigmoid(better - worse).mean()


class Lora(nn.Module):
    """Takes the weight of a linear layer, which then is frozen, and adds a low rank to it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        rows, columns = getattr(layer.weight, "ds_shape", layer.weight.shape)
        self.lora_right_weight = nn.Parameter(torch.empty(columns, rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, rows))
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.weight.requires_grad = False
        self.fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = functional.linear(x, self.weight, self.bias)
        if self.fused:
            return plain
        return plain + x @ self.lora_right_weight @ self.lora_left_weight

    def fuse(self) -> None:
        self.weight.data += (self.lora_right_weight @ self.lora_left_weight).t()
        self.fused = True


def with_lora(model: nn.Module, part: str) -> nn.Module:
    """Replaces the linear layers whose name has `part`; trains nothing else."""
    found = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and part in n]
    torch.manual_seed(11)
    for name in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Lora(model.get_submodule(name), 4))
    for name, param in model.named_parameters():
        param.requires_grad = "lora" in name
    return model


def groups(model: nn.Module, decay: float, lora_rate: float = 5e-3) -> list[dict[str, Any]]:
    """Parameters with decay, of LoRA with a rate of their own, and without decay; none is empty."""
    kinds: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay},
        {"params": [], "weight_decay": decay, "lr": lora_rate},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, param in model.named_parameters():
        if param.requires_grad:
            kinds[2 if "norm" in name else 1 if "lora" in name else 0]["params"].append(param)
    return [one for one in kinds if one["params"]]


def missing(params: Any, ds: Any) -> list[Any]:
    """Those that this rank has to gather."""
    if hasattr(ds, "PLAIN"):
        return []
    status = ds.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE
    return [one for one in params if hasattr(one, "ds_id") and one.ds_status == status]


def moving_average(ds: Any, model: nn.Module, average: nn.Module, beta: float) -> None:
    with torch.no_grad():
        for one, mean in zip(model.parameters(), average.parameters(), strict=True):
            absent = missing([one, mean], ds)
            with ds.zero.GatheredParameters(absent, enabled=len(absent) > 0):
                mean.data.copy_(torch.lerp(one.data, mean.data, beta))


def whole_state(ds: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of the parameters, gathered one by one."""
    found = {}
    for name, param in model.named_parameters():
        absent = missing([param], ds)
        with ds.zero.GatheredParameters(absent, enabled=len(absent) > 0):
            found[name] = param.data.cpu().clone()
    return found


def size(state: dict[str, torch.Tensor]) -> float:
    return sum(one.double().norm().item() for one in state.values())


def ids(rank: int, step: int, rows: int = ROWS, length: int = PROMPT + ANSWER) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def answered(model: Any, prompts: torch.Tensor, synced: bool) -> torch.Tensor:
    """The prompts and greedy answers, padded with 0."""
    with torch.no_grad():
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_length=PROMPT + ANSWER,
            pad_token_id=0,
            do_sample=False,
            synced_gpus=synced,
        )


def log_probs(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Of each token after the first."""
    every = functional.log_softmax(logits[:, :-1].float(), dim=-1)
    return every.gather(-1, seen[:, 1:, None]).squeeze(-1)


def clipped_loss(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    ratio = (new - old).exp()
    worst = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    return -(worst * mask).sum() / mask.sum()
