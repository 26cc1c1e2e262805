"""Joins the parts of a tensor on model-parallel ranks, and finds out how the tensor was cut.

The user's rules have precedence. The next source is the checkpoint's `universal_checkpoint_info`,
if its writer recorded it. The last source is the values: a tensor is whole if it is equal on all
ranks. A cut is never guessed, because a wrong cut can give the right shape. For example, if the
parts of a fused [Q|K|V] are joined as one matrix, its rows are in the wrong order.
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
    """How a tensor was cut: along one dim. If blocks are fused along this dim, each was cut
    separately."""

    dim: int  # -1: not cut, each rank has the whole tensor
    count: int = 1  # number of fused blocks, if they have the same size
    sizes: tuple[int, ...] = ()  # of other blocks: their uncut sizes along `dim`; (): use `count`
    rows: int = -1  # rows without padding; -1: not padded
    average: bool = False  # the whole is the mean over ranks

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Returns the shape of the whole tensor; None if these shapes do not fit together."""
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
        """Joins the parts, by rank. shape() must accept their shapes."""
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
        """Returns the sizes of the blocks in one rank's part; None if they do not fit."""
        if not self.sizes:
            size = part[self.dim]
            return None if size % self.count else [size // self.count] * self.count
        if any(size % ranks for size in self.sizes) or sum(self.sizes) != part[self.dim] * ranks:
            return None
        return [size // ranks for size in self.sizes]


WHOLE = Cut(-1)


def of_rules(rules: Rules, name: str, dims: int) -> tuple[str, Cut] | None:
    """Returns the first rule that matches the parameter or its module: its pattern and its cut.

    Args:
        dims: number of dims of the parameter. A vector (a bias) of style "row" is whole.

    Raises ConfigError for an unknown style.
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
    """Returns the rules without the styles that do not describe a parameter.

    Raises:
        ConfigError: the rules are not a mapping from patterns, or a style is unknown.
    """
    if not isinstance(rules, Mapping) or not all(isinstance(one, str) for one in rules):
        raise ConfigError(
            f"[convert::rules] {rules!r:.80} is not an object with patterns as keys; {_MEANT}"
        )
    of_modules = ("divide", "tokens", "gather_tokens")
    kept = {p: s for p, s in rules.items() if str(s).partition(":")[0] not in of_modules}
    for pattern, style in kept.items():
        _of_style(pattern, style, 2)
    return kept


# ---- the cut that a checkpoint records


def of_info(info: dict[str, Any], name: str, dims: int) -> Cut | None:
    """Returns the cut in `universal_checkpoint_info`; None if this reader cannot derive it.

    A parameter that matches no pattern is cut along dim 0.

    Raises:
        ConfigError: the version is unknown, or the info is contradictory or incomplete.
    """
    version = info.get("universal_checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version > _INFO_VERSION:
        raise ConfigError(
            f"[convert::deepspeed] universal_checkpoint_info has version {version}; versions up "
            f"to {_INFO_VERSION} are allowed. Use --rules to describe how the weights are cut"
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
            f"patterns: use --rules to describe how it is cut"
        )
    cut = said[0] if said else Cut(0)
    if _matches(info.get("vocabulary_parameter_patterns") or [], name):
        rows = info.get("original_vocab_size")
        if type(rows) is not int or cut.dim != 0 or cut.count > 1:
            raise ConfigError(
                f'[convert::deepspeed] "{name}" is padded, but universal_checkpoint_info does not '
                f"give its number of rows (original_vocab_size): describe its cut with --rules"
            )
        return Cut(0, rows=rows)
    return cut if cut.dim < dims else None


def _beyond(info: dict[str, Any]) -> list[str]:
    """Returns patterns of parameters whose description is not supported here.

    The user's rules must name these parameters.
    """
    affine = (info.get("affine_map") or {}).get("params") or {}
    fused = [p for one in info.get("parameter_with_sub_params") or [] for p in _patterns(one)]
    return [*affine, *fused, *(info.get("autotp_unsupported_parameter_patterns") or [])]


def _patterns(one: Any) -> list[str]:
    held = one if isinstance(one, dict) else getattr(one, "__dict__", {})
    return list(held.get("patterns") or [".*"])  # without patterns, any parameter may be meant


def _matches(patterns: Any, name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)


# ---- the cut that the values show


def equal(parts: list[torch.Tensor]) -> bool:
    first = parts[0]
    return all(one.shape == first.shape and torch.equal(one, first) for one in parts[1:])


def telling(value: torch.Tensor) -> bool:
    """Whether the parts of a cut tensor with this value would differ. If all elements are zero, or
    all are one, they would be equal."""
    if math.prod(value.shape) <= 1:
        return value.dim() == 0  # a scalar cannot be cut
    return bool((value != value.flatten()[0]).any())
