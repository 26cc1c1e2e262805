"""Models named on the command line, built without memory for their values."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

SPECS = (
    "module:callable or file.py:callable (no arguments, returns an nn.Module), "
    "gpt:layers=12,hidden=768,vocab=50257,seq=1024, a Hugging Face config.json, "
    "or parameters per block, such as 1e6,12e6,12e6"
)


def nearest(word: str, words: Sequence[str]) -> str:
    """What an error adds about a wrong word: the nearest right one, else all of them."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f'did you mean "{near[0]}"?' if near else f"known are {', '.join(words)}"


def pairs(text: str, keys: Sequence[str], option: str) -> dict[str, str]:
    """Reads `key=value,key=value`. Raises ValueError for a key not of `keys`, or given twice."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in keys:
            raise ValueError(f'[plan] {option} has no "{key}": {nearest(key, keys)}')
        if not equals or not value:
            raise ValueError(f'[plan] {option}: "{part}" should read {key}=value')
        if key in found:
            raise ValueError(f'[plan] {option} has "{key}" twice: {found[key]} and {value}')
        found[key] = value
    return found


class PlainGpt(nn.Module):
    """A GPT as in the GPT-2 report: learned positions, biases, tied output head."""

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


class Block(nn.Module):
    """So many parameters."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))


class Blocks(nn.Module):
    """A model known by the sizes of its blocks alone."""

    def __init__(self, numel: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count) for count in numel)


def whole(text: str, what: str) -> int:
    """A whole number >= 1, which may be written 7e9. Raises ValueError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number):
        raise ValueError(f'[plan] {what} is "{text}", not a whole number >= 1')
    return int(number)


def num_blocks(numel: int) -> int:
    """Layers of a plausible transformer of so many parameters.

    It is 128 times as wide as deep (GPT-3, arXiv:2005.14165, and LLaMA, arXiv:2302.13971, from 7e9
    on) with 12 x width^2 parameters a layer; embeddings are not counted.
    """
    return max(1, round(math.pow(numel / (12 * 128**2), 1 / 3)))


def _gpt(text: str) -> nn.Module:
    keys = ("layers", "hidden", "vocab", "seq")
    sizes = {"layers": 12, "hidden": 768, "vocab": 50257, "seq": 1024}
    for key, value in pairs(text, keys, "a gpt").items() if text else ():
        sizes[key] = whole(value, f"{key} of the gpt")
    return PlainGpt(**sizes)


def _module_of(name: str) -> Any:
    if not name.endswith(".py"):
        sys.path.insert(0, "")  # as for a script started here
        return importlib.import_module(name)
    path = pathlib.Path(name)
    if not path.is_file():
        raise ValueError(f'[plan] --model: there is no file "{name}"')
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
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
        raise ValueError(f"[plan] {name}:{attribute} gave a {type(model).__name__}, no nn.Module")
    return model


def _hugging_face(path: pathlib.Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"[plan] {path} needs the package transformers, which is not installed"
        ) from None
    names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    config = transformers.AutoConfig.from_pretrained(path.parent)
    kind = getattr(transformers, names[0], None) if names else None
    if kind is not None:
        return kind(config)  # type: ignore[no-any-return]
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def build(spec: str) -> nn.Module:
    """The model that `spec` names (see SPECS), on the meta device. Raises ValueError."""
    kind, colon, rest = spec.rpartition(":") if not spec.startswith("gpt:") else spec.partition(":")
    with torch.device("meta"):
        if spec == "gpt" or (colon and kind == "gpt"):
            return _gpt(rest if colon else "")
        if spec.endswith(".json"):
            if not pathlib.Path(spec).is_file():
                raise ValueError(f'[plan] --model: there is no file "{spec}"')
            return _hugging_face(pathlib.Path(spec))
        if colon:
            try:
                return _called(kind, rest)
            except ModuleNotFoundError as error:
                near = difflib.get_close_matches(kind, ["gpt"])
                also = f'; did you mean "gpt:{rest}"?' if near else ""
                raise ValueError(f"[plan] --model {spec}: {error}{also}") from error
        if spec[:1].isdigit():
            return Blocks([whole(part, "a block of --model") for part in spec.split(",")])
    raise ValueError(f'[plan] --model "{spec}" is none of: {SPECS}')
