"""Tiny models of transformers, built from configs, their data, and plain training of them.

Nothing is downloaded: weights come from a seed, tokens are random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.distributed as dist
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]

LIMIT = 1e-5  # as compare.WEIGHT_LIMIT
VOCAB, WIDTH, INNER, HEADS, LAYERS, PLACES = 64, 32, 48, 4, 2, 48
PAD, START, END = 0, 1, 2
SAMPLES, LENGTH = 3, 10  # of a rank's batch
ADAMW = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
SPECIAL = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": PLACES,
} | SPECIAL
# name: class of the config, class of the model, the config
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"n_positions": PLACES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | SPECIAL,
    ),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        LLAMA | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "t5": (
        transformers.T5Config,
        transformers.T5ForConditionalGeneration,
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_layers": LAYERS}
        | {"num_heads": HEADS, "dropout_rate": 0.0, "decoder_start_token_id": PAD}
        | SPECIAL,
    ),
    "bert": (
        transformers.BertConfig,
        transformers.BertForMaskedLM,
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER}
        | {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        | {"max_position_embeddings": PLACES, "hidden_dropout_prob": 0.0}
        | {"attention_probs_dropout_prob": 0.0, "pad_token_id": PAD},
    ),
}

# More of them that tensor ranks or parts of sequences compute.
KINDS_TOGETHER: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, LLAMA),
    "qwen3": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    ),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, LLAMA),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, LLAMA),
    "opt": (
        transformers.OPTConfig,
        transformers.OPTForCausalLM,
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "ffn_dim": INNER, "num_hidden_layers": 2}
        | {"num_attention_heads": HEADS, "dropout": 0.0, "max_position_embeddings": PLACES}
        | {"word_embed_proj_dim": WIDTH}
        | SPECIAL,
    ),
    "bloom": (
        transformers.BloomConfig,
        transformers.BloomForCausalLM,
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS} | SPECIAL,
    ),
    "falcon": (
        transformers.FalconConfig,
        transformers.FalconForCausalLM,
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
        | {"num_attention_heads": HEADS, "num_kv_heads": 2, "new_decoder_architecture": True}
        | SPECIAL,
    ),
}


def build(kind: str, **config: Any) -> Any:
    """The model, in training mode."""
    make_config, make_model, settings = (KINDS | KINDS_TOGETHER)[kind]
    model = make_model(make_config(**settings | config))
    return models.fill(model).train()


def batch(kind: str, step: int, rank: int) -> Batch:
    """A rank's samples: padded, of other lengths on each rank, and only some tokens have labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(END + 1, VOCAB, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, LENGTH - 2 - rank, LENGTH - 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tokens = tokens * mask + PAD * (1 - mask)
    labels = tokens.masked_fill(mask == 0, -100)
    if kind == "bert":
        hidden = torch.rand(tokens.shape, generator=generator) < 0.4
        labels = labels.masked_fill(~hidden, -100)
    if kind == "t5":  # what it says is shorter than what it was told
        labels = labels.roll(1, 0)[:, : LENGTH - 3].clone()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def prompts(rank: int = 0) -> Batch:
    """Padded on the left, as for generating."""
    generator = torch.Generator().manual_seed(7 + rank)
    tokens = torch.randint(END + 1, VOCAB, (2, 5), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    return {"input_ids": tokens * mask + PAD * (1 - mask), "attention_mask": mask}


class Plain:
    """What an engine is for a loop, by plain torch: it averages gradients over ranks by hand."""

    def __init__(self, model: nn.Module, make: Any = None):
        self.module = model
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make(params) if make else torch.optim.AdamW(params, **ADAMW)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> bool:
        world = dist.get_world_size()
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= world
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def gathered(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    uneven = gathered

    def state_dict(self, **_: Any) -> Batch:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def close(self) -> None:
        pass


class Mixed(Plain):
    """With fp32 masters behind a model in bf16."""

    def __init__(self, model: nn.Module):
        masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
        for param in model.parameters():  # buffers stay
            param.data = param.data.to(torch.bfloat16)
        super().__init__(model)
        self.masters, self.optimizer = masters, torch.optim.AdamW(masters, **ADAMW)

    def step(self) -> bool:
        params = list(self.module.parameters())
        for master, param in zip(self.masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        super().step()
        for master, param in zip(self.masters, params, strict=True):
            param.data.copy_(master.data)
        return True

    def state_dict(self, **_: Any) -> Batch:
        params = self.module.parameters()
        masters = {id(p): one.detach() for p, one in zip(params, self.masters, strict=True)}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: masters[id(param)].clone() for name, param in named}


Story = Callable[[Any, str, int], dict[str, Any]]


def start(strategy: str, model: nn.Module, config: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415 - plain torch does without

    settings = {"strategy": strategy, "optimizer": {"type": "AdamW"} | ADAMW}
    return penstock.initialize(model, settings | {"comm": {"timeout_s": 120}} | config)


def told(engine: Any, story: Story, kind: str, rank: int) -> dict[str, Any]:
    """What the story gives, and the weights after it and after close()."""
    torch.manual_seed(rank)
    try:
        said = story(engine, kind, rank)
        weights = engine.state_dict(rank0_only=False)
    finally:
        engine.close()
    left = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return said | {"weights": weights, "closed": left}


def far(ours: Any, theirs: Any) -> float:
    """The largest difference of what two stories gave, absolute below 1 and relative above; tokens
    and other whole numbers have none."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), f"{list(ours)}, not {list(theirs)}"
        return max((far(ours[name], theirs[name]) for name in theirs), default=0.0)
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        return max((far(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    if not isinstance(theirs, (torch.Tensor, float)):
        assert ours == theirs, f"{ours}, not {theirs}"
        return 0.0
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    assert ours.shape == theirs.shape, f"{ours.shape}, not {theirs.shape}"
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{ours.tolist()}, not {theirs.tolist()}"
    apart = (ours.double() - theirs.double()).abs() / theirs.double().abs().clamp(min=1.0)
    return float(apart.max()) if apart.numel() else 0.0


def check(outcomes: list[dict[str, float]], limit: float = LIMIT) -> None:
    """Every rank's: what `compared` gives."""
    for rank, apart in enumerate(outcomes):
        beyond = {name: value for name, value in apart.items() if not value <= limit}
        assert not beyond, f"rank {rank} is apart from plain torch: {beyond}"


def compared(
    story: Story,
    kind: str,
    strategy: str,
    make: Callable[[str], Any] = build,
    config: dict[str, Any] | None = None,
) -> dict[str, float]:
    """On a rank: the story told by an engine and by plain torch, and how far they are apart."""
    rank = dist.get_rank()
    ours = told(start(strategy, make(kind), config or {}), story, kind, rank)
    theirs = told(Plain(make(kind)), story, kind, rank)
    assert list(ours) == list(theirs)
    return {name: far(ours[name], theirs[name]) for name in theirs}
