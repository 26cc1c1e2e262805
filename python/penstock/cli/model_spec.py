"""Descriptions of models for `penstock plan` that need no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any, Protocol

from penstock._native import _penstock

HEAD = 128  # assumed size of an attention head
_ASSUMED = {"sequence": 2048, "vocabulary": 0}  # for a model given only by numbers of parameters
SPECS = (
    "module:callable or file.py:callable (no arguments, returns an nn.Module), "
    "gpt:layers=12,hidden=768,vocab=50257,seq=1024, a Hugging Face config.json, "
    "or parameters per block, such as 1e6,12e6,12e6"
)


@dataclasses.dataclass(frozen=True)
class UnitSize:
    """A unit's number of parameters, and how many of these are in matrices of a repeated block."""

    numel: int
    matrices: int = 0


class PlannedModel(Protocol):
    """The description of a model for the simulator."""

    @property
    def sequence(self) -> int | None:
        """Tokens of a sequence, or None if unknown."""

    def tree(self) -> Any:
        """Returns the model for the C++ engine, a `_penstock.ModelTree`."""

    def shape(self) -> tuple[dict[str, int], str]:
        """Returns the sizes of the model as a transformer, and their source."""

    def units(self, found_by: Any) -> list[UnitSize]:
        """Returns the units, the root first. `found_by`: the section `units` of a config."""

    def cached_values(self) -> int | None:
        """Returns the values of keys and values that one token adds to the KV cache, or None if
        they are unknown. Assumes full attention in every layer."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A model given only by the number of parameters of each block."""

    numel: Sequence[int]
    sequence: None = None

    def tree(self) -> Any:
        modules = [
            _penstock.ModuleInfo("", "Blocks", -1, []),
            _penstock.ModuleInfo("blocks", "ModuleList", 0, []),
        ]
        params = []
        for index, numel in enumerate(self.numel):
            name = f"blocks.{index}"
            modules.append(_penstock.ModuleInfo(name, "Block", 1, [index]))
            params.append(_penstock.ParamInfo(f"{name}.weight", [numel], 0))
        return _penstock.ModelTree(modules, params, [], None)

    def shape(self) -> tuple[dict[str, int], str]:
        layers = len(self.numel)
        hidden = max(1, round((sum(self.numel) / layers / 12) ** 0.5))
        shape = {"layers": layers, "hidden": hidden, "heads": num_heads(hidden), **_ASSUMED}
        return shape, "all assumed: a transformer with 12 x hidden^2 parameters per layer"

    def units(self, found_by: Any) -> list[UnitSize]:
        """Returns one unit per block, after an empty root. All parameters count as matrices."""
        return [UnitSize(0), *(UnitSize(numel, numel) for numel in self.numel)]

    def cached_values(self) -> None:
        return None


def num_heads(hidden: int) -> int:
    """Returns the number of attention heads of a plausible transformer of that width."""
    return max(1, round(hidden / HEAD))


def nearest(word: str, words: Sequence[str]) -> str:
    """Returns advice about a wrong word: the nearest known word, or all known words."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f'did you mean "{near[0]}"?' if near else f"allowed: {', '.join(words)}"


def pairs(text: str, keys: Sequence[str], option: str) -> dict[str, str]:
    """Parses `key=value,key=value`. Raises ValueError for a key outside `keys` or given twice."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in keys:
            raise ValueError(f'[plan] {option} has no "{key}": {nearest(key, keys)}')
        if not equals or not value:
            raise ValueError(f'[plan] {option}: "{part}" must have the form {key}=value')
        if key in found:
            raise ValueError(f'[plan] {option} has "{key}" twice: {found[key]} and {value}')
        found[key] = value
    return found


def whole(text: str, what: str) -> int:
    """Parses a whole number >= 1, also in the form 7e9. Raises ValueError for any other text."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number):
        raise ValueError(f'[plan] {what} is "{text}", not a whole number >= 1')
    return int(number)


def num_blocks(numel: int) -> int:
    """Returns the number of layers of a plausible transformer with `numel` parameters.

    It is 128 times as wide as deep (GPT-3, arXiv:2005.14165, and LLaMA, arXiv:2302.13971, from 7e9
    on), with 12 x width^2 parameters per layer and without embeddings.
    """
    return max(1, round(math.pow(numel / (12 * 128**2), 1 / 3)))


def blocks_of(spec: str) -> Blocks | None:
    """Returns the model of "1e6,12e6,12e6", or None for a spec of another form.

    Raises ValueError if a number is not a whole number >= 1.
    """
    if not spec[:1].isdigit() or ":" in spec or spec.endswith(".json"):
        return None
    return Blocks([whole(part, "a block of --model") for part in spec.split(",")])
