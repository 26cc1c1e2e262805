"""Tiny models of the Transformers library, built from configs: nothing is downloaded."""

from __future__ import annotations

import pathlib

import transformers

VOCABULARY = 256
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def config_of(name: str) -> transformers.PretrainedConfig:
    """Returns the config of "gpt2", "llama" or "moe"."""
    if name == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, n_positions=128, **SMALL, **no_dropout
        )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if name == "llama":
        return transformers.LlamaConfig(**sizes, **SMALL)
    if name == "moe":
        return transformers.MixtralConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, **SMALL
        )
    raise ValueError(f"no model {name!r}: gpt2, llama or moe")


def build(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Returns a model with random weights that depend only on the seed, or a folder's model."""
    if pathlib.Path(name).is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(name)
    transformers.set_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config_of(name))
