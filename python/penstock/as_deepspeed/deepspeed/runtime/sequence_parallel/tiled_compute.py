"""Computes functions of long sequences in parts, so that only one part's activations exist at
a time (arXiv:2506.13996). Backward computes each part again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from penstock import ConfigError

from ..activation_checkpointing import checkpointing

_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda whole: whole,
    "mean": torch.mean,
    "sum": torch.sum,
}


def _recomputed(function: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpointing.non_reentrant_checkpoint(function, *args)


def _reduce(whole: torch.Tensor, reduction: Any) -> torch.Tensor:
    if reduction not in _REDUCTIONS:
        raise ConfigError(
            f"[deepspeed::tiled_compute] output_reduction is {reduction!r}; allowed: "
            f"{', '.join(map(repr, _REDUCTIONS))}"
        )
    return _REDUCTIONS[reduction](whole)


def sequence_tiled_compute(  # noqa: PLR0913 - DeepSpeed's signature
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Calls `fn` on parts of a sequence.

    Args:
        fn: fn(**part, **kwargs_to_pass) -> output of the part.
        seqlen: the size of dim 1 of the tensors in kwargs_to_shard, [batch, seqlen, ...].
        shards: the maximum number of parts; the last part may be shorter.
        kwargs_to_shard, kwargs_to_pass: arguments that are cut, and that are not.
        grad_requiring_tensor_key, compute_params: accepted, without effect: all tensors and
            parameters get their gradients.
        output_unshard_dimension: the dim along which outputs are joined; 0: outputs are losses, [].
        output_reduction: None, "mean" or "sum" of the joined outputs.

    Raises ConfigError for other values of output_reduction, or if dim 1 of a tensor is not seqlen.
    """
    shapes = {key: tuple(one.shape) for key, one in kwargs_to_shard.items()}
    unlike = {key: one for key, one in shapes.items() if one[1:2] != (seqlen,)}
    if unlike:
        raise ConfigError(
            f"[deepspeed::tiled_compute] seqlen is {seqlen}, but tensors of kwargs_to_shard have "
            f"other shapes, {unlike}; allowed: [batch, seqlen, ...]"
        )
    size, outputs = math.ceil(seqlen / shards), []
    for begin in range(0, seqlen, size):
        part = {key: one[:, begin : begin + size] for key, one in kwargs_to_shard.items()}
        outputs.append(_recomputed(partial(fn, **part, **kwargs_to_pass)))
    joined = torch.stack(outputs) if output_unshard_dimension == 0 else (
        torch.cat(outputs, output_unshard_dimension)
    )  # fmt: skip
    return _reduce(joined, output_reduction)


class TiledMLP:
    """`TiledMLP.apply(fn, module, x, shards, compute_params)` calls fn(module, part of x)."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], module: Any, x: torch.Tensor, shards: int, params: Any
    ) -> torch.Tensor:
        """Returns the joined outputs.

        Args:
            fn: fn(module, part) -> [..., part of tokens, size].
            module: passed to fn.
            x: [..., tokens, size].
            shards: the maximum number of parts.
            params: accepted, without effect.
        """
        return torch.cat([_recomputed(fn, module, part) for part in x.chunk(shards, -2)], -2)


class TiledFusedLogitsLoss:
    """`apply()` calls a loss function on parts of the tokens, so not all logits exist at once."""

    @staticmethod
    def apply(  # noqa: PLR0913 - DeepSpeed's signature
        fn: Callable[..., torch.Tensor],
        module: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        params: Any,
        output_reduction: str,
    ) -> torch.Tensor:
        """Returns the mean or the sum of the parts' losses, [].

        Args:
            fn: fn(module, part of x, part of y) -> []; if a mask is given, its part is the fourth
                argument.
            module: passed to fn.
            x, y: [batch, tokens, ...]. Parts are [part of batch * tokens, ...].
            mask: [batch, tokens] or None.
            shards: the maximum number of parts.
            params: accepted, without effect.
            output_reduction: "mean" or "sum".

        Raises ConfigError for other shapes or another output_reduction.
        """
        whole = [x, y] if mask is None else [x, y, mask]
        alike = all(one.dim() > 1 and one.shape[:2] == x.shape[:2] for one in whole)
        if not alike or (mask is not None and mask.dim() != 2) or output_reduction is None:
            raise ConfigError(
                f"[deepspeed::TiledFusedLogitsLoss] the shapes of x, y (and mask) are "
                f"{[tuple(one.shape) for one in whole]}, and output_reduction is "
                f"{output_reduction!r}; allowed: x and y of [batch, tokens, ...], mask of [batch, "
                f'tokens], "mean" or "sum"'
            )
        parts = zip(*(one.flatten(0, 1).chunk(shards) for one in whole), strict=True)
        losses = [_recomputed(fn, module, *part) for part in parts]
        return _reduce(torch.stack(losses), output_reduction)


class AutogradComputeMLP:
    """`AutogradComputeMLP.apply(fn, module, x)` is fn(module, x), computed again in backward."""

    @staticmethod
    def apply(fn: Callable[..., torch.Tensor], module: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _recomputed(fn, module, x)
        return made
