"""How the parts that ranks of a model have of a tensor are joined: who says so, and the joining.

The user's rules say it first, then `universal_checkpoint_info`, which the checkpoint holds where
its writer knew, then the values: what is equal on all ranks is whole. Nothing is guessed: parts
of a fused [Q|K|V], joined as if it were one, have the right shape and the wrong rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from penstock._native import ConfigError

Rules = Mapping[str, str | int]
_INFO_VERSION = 0.4
_MEANT = 'allowed: a dim (0, 1), "column", "column:3", "column:64,16,16", "row", "vocab", "whole"'


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dim, and what lies in it one behind the other, each cut by itself; dim -1: whole."""

    dim: int
    count: int = 1  # of equal parts, or
    sizes: tuple[int, ...] = ()  # theirs, whole
    rows: int = -1  # without padding
    average: bool = False

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Of the whole, or None where these are not parts of one."""
        first, dim = shapes[0], self.dim
        if dim < 0:
            return first if all(shape == first for shape in shapes) else None
        if any(len(s) <= dim or len(s) != len(first) for s in shapes):
            return None
        if any(s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
            return None
        fused = self.count > 1 or self.sizes
        if fused and (any(s != first for s in shapes) or self._pieces(first, len(shapes)) is None):
            return None
        size = sum(s[dim] for s in shapes)
        if self.rows > size:
            return None
        return (*first[:dim], self.rows if self.rows >= 0 else size, *first[dim + 1 :])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Of parts whose shapes shape() takes."""
        if self.average:
            return torch.stack(parts).mean(0)
        if self.dim < 0:
            return parts[0]
        pieces = self._pieces(tuple(parts[0].shape), len(parts))
        if self.count > 1 or self.sizes:
            assert pieces is not None
            cut = [torch.split(part, pieces, self.dim) for part in parts]
            made = [one for by_rank in zip(*cut, strict=True) for one in by_rank]
        else:
            made = parts
        whole = torch.cat(made, self.dim)
        return whole.narrow(self.dim, 0, self.rows) if self.rows >= 0 else whole

    def _pieces(self, part: tuple[int, ...], ranks: int) -> list[int] | None:
        """Sizes of what one rank's part is put together of."""
        if not self.sizes:
            size = part[self.dim]
            return None if size % self.count else [size // self.count] * self.count
        if any(size % ranks for size in self.sizes) or sum(self.sizes) != part[self.dim] * ranks:
            return None
        return [size // ranks for size in self.sizes]


WHOLE = Cut(-1)


def of_rules(rules: Rules, name: str, dims: int) -> tuple[str, Cut] | None:
    """The first rule whose pattern is of the parameter or of its module, and what it says.

    Args:
        dims: of the parameter. A vector (a bias) of a "row" is whole.
    """
    module = name.rpartition(".")[0]
    for pattern, style in rules.items():
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(module, pattern):
            return pattern, _of_style(pattern, style, dims)
    return None


def _of_style(pattern: str, style: str | int, dims: int) -> Cut:
    if type(style) is int and style >= 0:
        return Cut(style)
    kind, colon, numbers = str(style).partition(":")
    if not colon and kind in ("column", "column_gather", "vocab"):
        return Cut(0)
    if not colon and kind in ("row", "row_cut", "row_tokens"):
        return Cut(1) if dims > 1 else WHOLE
    if style in ("whole", "partial"):
        return WHOLE
    if kind == "column" and re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", numbers):
        sizes = tuple(map(int, numbers.split(",")))
        return Cut(0, sizes=sizes) if len(sizes) > 1 else Cut(0, count=sizes[0])
    raise ConfigError(f'[convert::rules] "{pattern}" is {style!r}; {_MEANT}')


def checked(rules: Rules) -> Rules:
    """Rules without what says nothing of a parameter.

    Raises:
        ConfigError: a style that is none.
    """
    if not isinstance(rules, Mapping) or not all(isinstance(one, str) for one in rules):
        raise ConfigError(f"[convert::rules] {rules!r:.80} is no object of patterns; {_MEANT}")
    of_modules = ("divide", "tokens", "gather_tokens")
    kept = {p: s for p, s in rules.items() if str(s).partition(":")[0] not in of_modules}
    for pattern, style in kept.items():
        _of_style(pattern, style, 2)
    return kept


# ---- what a checkpoint says


def of_info(info: dict[str, Any], name: str, dims: int) -> Cut | None:
    """What `universal_checkpoint_info` says; what is in no pattern is cut along dim 0.

    Raises:
        ConfigError: it says what is not known here, or two things.
    """
    version = info.get("universal_checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version > _INFO_VERSION:
        raise ConfigError(
            f"[convert::deepspeed] universal_checkpoint_info is of version {version}; known are "
            f"those up to {_INFO_VERSION}. Say how weights are cut with --rules"
        )
    if _matches(_beyond(info), name):
        return None
    kinds = {
        "tp_replicated_parameter_patterns": WHOLE,
        "parameter_to_average_patterns": Cut(-1, average=True),
        "parameter_with_2_sub_params_cat_dim_0": Cut(0, count=2),
        "parameter_with_row_parallelism_patterns": Cut(1),
    }
    said = [cut for key, cut in kinds.items() if _matches(info.get(key) or [], name)]
    if len(said) > 1:
        raise ConfigError(
            f'[convert::deepspeed] universal_checkpoint_info has "{name}" in several kinds of '
            f"patterns: say how it is cut with --rules"
        )
    cut = said[0] if said else Cut(0)
    if _matches(info.get("vocabulary_parameter_patterns") or [], name):
        rows = info.get("original_vocab_size")
        if type(rows) is not int or cut.dim != 0 or cut.count > 1:
            raise ConfigError(
                f'[convert::deepspeed] "{name}" is padded, and universal_checkpoint_info does not '
                f"say to how many rows (original_vocab_size)"
            )
        return Cut(0, rows=rows)
    return cut if cut.dim < dims else None


def _beyond(info: dict[str, Any]) -> list[str]:
    """Patterns of what is described in ways that are not read here: rules have to name it."""
    affine = (info.get("affine_map") or {}).get("params") or {}
    fused = [p for one in info.get("parameter_with_sub_params") or [] for p in _patterns(one)]
    return [*affine, *fused, *(info.get("autotp_unsupported_parameter_patterns") or [])]


def _patterns(one: Any) -> list[str]:
    held = one if isinstance(one, dict) else getattr(one, "__dict__", {})
    return list(held.get("patterns") or [".*"])  # all, where it cannot be told


def _matches(patterns: Any, name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)


# ---- what the values say


def equal(parts: list[torch.Tensor]) -> bool:
    first = parts[0]
    return all(one.shape == first.shape and torch.equal(one, first) for one in parts[1:])


def telling(value: torch.Tensor) -> bool:
    """Whether parts of it would differ: those of zeros, or of ones, do not."""
    if math.prod(value.shape) <= 1:
        return value.dim() == 0  # nothing that could be cut
    return bool((value != value.flatten()[0]).any())
