"""Builds the modules that the command line names, on the meta device."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.cli import model_units
from penstock.cli.model_spec import HEAD, SPECS, UnitSize, nearest, num_heads, pairs, whole
from penstock.front import module_tree

# Key of a shape -> its possible names in transformers configs.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length"),
    "vocabulary": ("vocab_size",),
}


class Built:
    """A module on the meta device, as a model_spec.PlannedModel."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.sequence = module.seq if isinstance(module, PlainGpt) else None

    def tree(self) -> Any:
        return module_tree.model_tree(self._module, {})

    def shape(self) -> tuple[dict[str, int], str]:
        """Returns the transformer's sizes and their source. Raises ValueError if unknown."""
        module = self._module
        if isinstance(module, PlainGpt):
            vocabulary, hidden = module.tokens.weight.shape
            shape = {"layers": len(module.blocks), "hidden": hidden, "heads": num_heads(hidden)}
            shape |= {"sequence": module.seq, "vocabulary": vocabulary}
            return shape, f"heads of {HEAD} values each are assumed"
        config = getattr(module, "config", None)
        if config is not None:
            return _shape_in(config.get_text_config())
        raise ValueError(
            "[plan] the width and heads of this model are unknown. To compare meshes, use gpt:..., "
            "a Hugging Face config, parameters per block or --params"
        )

    def units(self, found_by: Any) -> list[UnitSize]:
        """Returns the units. Raises ValueError if a class of `found_by.modules` is not found."""
        return model_units.unit_sizes(self._module, found_by.modules, found_by.layer_bytes)

    def cached_values(self) -> int | None:
        module = self._module
        if isinstance(module, PlainGpt):
            return 2 * len(module.blocks) * module.tokens.embedding_dim
        config = getattr(module, "config", None)
        inner = getattr(config, "get_text_config", None)
        return _cached_in(inner() if inner is not None else config)


def _cached_in(config: Any) -> int | None:
    """Returns 2 x layers x key and value heads x values per head, or None if a number is absent.

    An encoder-decoder has two caches, so its number is unknown.
    """
    if getattr(config, "is_encoder_decoder", False):
        return None

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    layers, heads = first(*_NAMES["layers"]), first(*_NAMES["heads"])
    hidden, head = first(*_NAMES["hidden"]), first("head_dim")
    if head is None and hidden is not None and heads:
        head = hidden // heads
    heads = first("num_key_value_heads", "num_kv_heads") or heads
    return 2 * layers * heads * head if layers and heads and head else None


def _shape_in(config: Any) -> tuple[dict[str, int], str]:
    shape: dict[str, int] = {}
    for key, names in _NAMES.items():
        values = [getattr(config, name, None) for name in names]
        found = [value for value in values if isinstance(value, int)]
        if not found:
            raise ValueError(
                f"[plan] the model's config has none of the keys {', '.join(names)}. To compare "
                f"meshes, it must have one of them"
            )
        shape[key] = found[0]
    keys = getattr(config, "num_key_value_heads", None)
    if isinstance(keys, int) and keys != shape["heads"]:
        shape["key_value_heads"] = keys
    return shape, "from the model's config"


class PlainGpt(nn.Module):
    """A GPT as in the GPT-2 report: learned positions, biases, tied output head. On meta only."""

    def __init__(self, layers: int, hidden: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 1, 4 * hidden) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.seq = seq


def _gpt(text: str) -> nn.Module:
    keys = ("layers", "hidden", "vocab", "seq")
    sizes = {"layers": 12, "hidden": 768, "vocab": 50257, "seq": 1024}
    for key, value in pairs(text, keys, "a gpt").items() if text else ():
        sizes[key] = whole(value, f"{key} of the gpt")
    return PlainGpt(**sizes)


def _module_of(name: str) -> Any:
    if not name.endswith(".py"):
        sys.path.insert(0, "")  # imports from the current folder, as a script does
        return importlib.import_module(name)
    path = pathlib.Path(name)
    if not path.is_file():
        raise ValueError(f'[plan] --model: there is no file "{name}"')
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _called(name: str, attribute: str) -> nn.Module:
    module = _module_of(name)
    make: Callable[[], Any] | None = getattr(module, attribute, None)
    if make is None:
        names = [word for word in vars(module) if not word.startswith("_")]
        raise ValueError(f'[plan] {name} has no "{attribute}": {nearest(attribute, names)}')
    model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"[plan] {name}:{attribute} returned a {type(model).__name__}, not an nn.Module"
        )
    return model


def _config_in(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in the file. Raises ValueError if it is not a transformers config."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"[plan] --model: cannot read {path} as JSON: {error}") from error
    if not isinstance(held, dict) or not isinstance(held.get("model_type"), str):
        raise ValueError(
            f'[plan] --model: {path} has no "model_type", so it is not the config of a Hugging '
            f"Face model. Pass the config.json that save_pretrained() wrote, or a copy of it"
        )
    return held


def _hugging_face(path: pathlib.Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(f"[plan] {path} needs the package transformers. Install it") from None
    names = _config_in(path).get("architectures") or []
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, names[0], None) if names else None
        if kind is not None:
            return kind(config)  # type: ignore[no-any-return]
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise ValueError(
            f"[plan] --model: transformers cannot build a model from {path}: {error!r}. Pass the "
            f"config.json that save_pretrained() wrote, or a copy of it"
        ) from error


def build(spec: str) -> Built:
    """Builds the module that `spec` names (model_spec.SPECS), on the meta device.

    Raises ValueError if `spec` is not valid, or does not lead to a module.
    """
    kind, colon, rest = spec.rpartition(":") if not spec.startswith("gpt:") else spec.partition(":")
    with torch.device("meta"):
        if spec == "gpt" or (colon and kind == "gpt"):
            return Built(_gpt(rest if colon else ""))
        if spec.endswith(".json"):
            if not pathlib.Path(spec).is_file():
                raise ValueError(f'[plan] --model: there is no file "{spec}"')
            return Built(_hugging_face(pathlib.Path(spec)))
        if colon:
            try:
                return Built(_called(kind, rest))
            except ModuleNotFoundError as error:
                near = difflib.get_close_matches(kind, ["gpt"])
                also = f'; did you mean "gpt:{rest}"?' if near else ""
                raise ValueError(f"[plan] --model {spec}: {error}{also}") from error
    raise ValueError(f'[plan] --model is "{spec}"; allowed: {SPECS}')
