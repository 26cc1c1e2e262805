"""Rules of known models for the key `parallel.rules`: how tensor ranks cut their layers.

A rule is a name pattern and a style. docs/parallel.md describes the styles. The first pattern that
matches a name decides.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock._native import ConfigError
from penstock.front import module_tree

Rules = dict[str, str]

# Rules by `config.model_type` of transformers, for models without a plan in transformers.
OURS: Mapping[str, Rules] = {
    "gpt2": {
        "*.attn.c_attn": "column:3",  # [Q|K|V]
        "*.crossattention.c_attn": "column:2",  # [K|V]
        "*.crossattention.q_attn": "column",
        "*attn.c_proj": "row",
        "*attention.c_proj": "row",
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
        "*attn.split_size": "divide",
        "*attention.split_size": "divide",
        "*attn.num_heads": "divide",
        "*attention.num_heads": "divide",
        "*wte": "vocab",
        "lm_head": "vocab",
    },
    "opt": {
        "*.self_attn.q_proj": "column",
        "*.self_attn.k_proj": "column",
        "*.self_attn.v_proj": "column",
        "*.self_attn.out_proj": "row",
        "*.self_attn.num_heads": "divide",
        "*.fc1": "column",
        "*.fc2": "row",
        "*embed_tokens": "vocab",
        "lm_head": "vocab",
    },
    "bloom": {
        "*.self_attention.query_key_value": "column",  # [heads, Q|K|V]
        "*.self_attention.dense": "row",
        "*.self_attention.num_heads": "divide",
        "*.mlp.dense_h_to_4h": "column",
        "*.mlp.dense_4h_to_h": "row",
        "*word_embeddings": "vocab",
        "lm_head": "vocab",
    },
    "falcon": {
        # [heads, Q|K|V] or [kv heads, Q..|K|V]. num_heads comes before num_kv_heads, so that an
        # unsupported Falcon raises the error of _refuse_falcon().
        "*.self_attention.query_key_value": "column",
        "*.self_attention.dense": "row",
        "*.self_attention.num_heads": "divide",
        "*.self_attention.num_kv_heads": "divide",
        "*.mlp.dense_h_to_4h": "column",
        "*.mlp.dense_4h_to_h": "row",
        "*word_embeddings": "vocab",
        "lm_head": "vocab",
    },
    "bert": {
        "*.attention.self.query": "column",
        "*.attention.self.key": "column",
        "*.attention.self.value": "column",
        "*.attention.self.num_attention_heads": "divide",
        "*.attention.self.all_head_size": "divide",
        "*.crossattention.self.query": "column",
        "*.crossattention.self.key": "column",
        "*.crossattention.self.value": "column",
        "*.layer.*.output.dense": "row",
        "*.intermediate.dense": "column",
    },
    "t5": {
        "*Attention.q": "column",
        "*Attention.k": "column",
        "*Attention.v": "column",
        "*Attention.o": "row",
        "*Attention.relative_attention_bias": "column",
        "*Attention.n_heads": "divide",
        "*Attention.inner_dim": "divide",
        "*DenseReluDense.wi": "column",
        "*DenseReluDense.wi_0": "column",
        "*DenseReluDense.wi_1": "column",
        "*DenseReluDense.wo": "row",
        "shared": "vocab",
        "*embed_tokens": "vocab",
        "lm_head": "vocab",
    },
}

_DECODER: Rules = {
    "*layers": "tokens",
    "*.layers.*.self_attn": "gather_tokens",
    "*.layers.*.mlp": "gather_tokens",
    "*.input_layernorm": "partial",
    "*.post_attention_layernorm": "partial",
}
# Rules that "parallel.norms": "tokens" adds, by `config.model_type`; "row" becomes "row_tokens".
TOKENS: Mapping[str, Rules] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gpt2": {
        "*h": "tokens",
        "*h.*.attn": "gather_tokens",
        "*h.*.mlp": "gather_tokens",
        "*.ln_1": "partial",
        "*.ln_2": "partial",
    },
    "bert": {
        "*encoder.layer": "tokens",
        "*.attention.self": "gather_tokens",
        "*.intermediate": "gather_tokens",
        "*.layer.*.output.LayerNorm": "partial",
    },
}

# Styles of transformers' plans (distributed/tensor_parallel.py of version 5) -> Penstock's styles.
_STYLES = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row_cut",
    "rowwise_rep": "row_cut",
    "packed_colwise": "column:2",
    "packed_rowwise": "row:2",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "column_gather",
    "replicated_with_grad_allreduce": "partial",
    "replicate": "whole",
}


def rules_for(model: torch.nn.Module, tensor: int) -> Rules:
    """Returns the rules of a model on `tensor` ranks; empty if the model is unknown.

    Raises ConfigError if a number of heads does not fit `tensor`, or transformers' plan has a style
    that is not supported.
    """
    config = getattr(model, "config", None)
    plan = getattr(model, "_tp_plan", None) or {}
    if plan:
        found = _of_transformers(model, plan, tensor)
    else:
        found = dict(OURS.get(getattr(config, "model_type", ""), {}))
        names = _names(model)
        found = {pattern: style for pattern, style in found.items() if _any(names, pattern)}
        if found:
            _check_heads(config, tensor, shared=False)
    return _with_both_embeddings(model, found)


def with_tokens(model: torch.nn.Module, rules: Rules) -> Rules:
    """Returns the rules plus those that cut tokens between layers.

    Raises ConfigError if TOKENS has no rules for the model.
    """
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind not in TOKENS:
        raise ConfigError(
            f'[front::initialize] "parallel.norms" is "tokens", but this model is a '
            f"{type(model).__name__}, and rules exist only for {', '.join(TOKENS)}. Set "
            f'"parallel.rules" with the styles "tokens", "gather_tokens", "row_tokens" and '
            f'"partial" (docs/parallel.md)'
        )
    rows = {
        pattern: style.replace("row", "row_tokens", 1) if style.split(":")[0] == "row" else style
        for pattern, style in rules.items()
    }
    return {**TOKENS[kind], **rows}


def _of_transformers(model: torch.nn.Module, plan: Mapping[str, str], tensor: int) -> Rules:
    config = getattr(model, "config", None)
    head = _name_of(model, "get_output_embeddings")
    cut_heads = "colwise" in (style for name, style in plan.items() if name.endswith("q_proj"))
    heads = _check_heads(config, tensor, shared=True) if cut_heads else 0
    names, rules = _names(model), {}
    for pattern, style in plan.items():
        if not _any(names, pattern):
            continue
        if style not in _STYLES:
            raise ConfigError(
                f'[front::initialize] "mesh.tensor" is {tensor}: transformers\' plan for this '
                f'model cuts "{pattern}" as "{style}", which is not supported yet. Set '
                f'"parallel.rules"'
            )
        rules[pattern] = "vocab" if pattern == head else _STYLES[style]
        if heads and style == "colwise" and pattern.endswith(("k_proj", "v_proj")):
            rules[pattern] = f"shared:{heads}"
    if heads:
        rules["*.num_key_value_groups"] = f"divide:{tensor // heads}"
    return rules


def _check_heads(config: Any, tensor: int, shared: bool) -> int:
    """Returns the number of key and value heads if it is less than `tensor`, else 0.

    Raises ConfigError if a number of heads does not fit `tensor`.
    """
    queries = next(
        (
            getattr(config, name)
            for name in ("num_attention_heads", "num_heads", "n_head")
            if hasattr(config, name)
        ),
        0,
    )
    keys = getattr(config, "num_key_value_heads", None) or queries
    if queries % tensor:
        raise ConfigError(
            f'[front::initialize] "mesh.tensor" is {tensor}, which does not divide the model\'s '
            f"{queries} attention heads. Set it to a divisor of {queries}"
        )
    if keys % tensor == 0:
        return 0
    if not shared or tensor % keys:
        raise ConfigError(
            f'[front::initialize] "mesh.tensor" is {tensor}, but the model has {keys} key and '
            f"value heads. One of the two numbers must be a multiple of the other"
        )
    return int(keys)


def _with_both_embeddings(model: torch.nn.Module, rules: Rules) -> Rules:
    """If embedding and head share a weight but only one is cut, drops the rules of the cut one."""
    first, last = _name_of(model, "get_input_embeddings"), _name_of(model, "get_output_embeddings")
    if not first or not last:
        return rules
    both = [module_tree.submodule(model, name) for name in (first, last)]
    weights = [getattr(module, "weight", None) for module in both]
    if weights[0] is not weights[1]:
        return rules
    cutting = [[p for p in rules if matches(name, p)] for name in (first, last)]
    if all(cutting):
        return rules
    return {p: style for p, style in rules.items() if p not in (*cutting[0], *cutting[1])}


def _name_of(model: torch.nn.Module, getter: str) -> str:
    try:
        wanted = getattr(model, getter, lambda: None)()
    except NotImplementedError:
        return ""
    return next((name for name, module in module_tree.modules_of(model) if module is wanted), "")


def _names(model: torch.nn.Module) -> list[str]:
    names = [name for name, _ in module_tree.modules_of(model)]
    names += [name for name, _ in module_tree.params_of(model)]
    return names + list(attributes(model))


def attributes(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Returns the integer attributes of modules by name, such as "blocks.0.attention.num_heads".

    The value is the module and the attribute's name.
    """
    return {
        f"{name}.{key}" if name else key: (module, key)
        for name, module in module_tree.modules_of(model)
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _any(names: Iterable[str], pattern: str) -> bool:
    return any(matches(name, pattern) for name in names)


def matches(name: str, pattern: str) -> bool:
    """Whether the name matches the pattern, as the engine matches rules. `*` also matches dots."""
    return fnmatch.fnmatchcase(name, pattern)
