"""Attention over sequences that are cut among ranks (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock import ConfigError

_HEADS = 2  # the dim of heads, in [batch, tokens, heads, size] and [tokens, batch, heads, size]


def shares(heads: int, ranks: int) -> list[int]:
    """Returns the number of heads per rank. A remainder goes to the first ranks, one head each."""
    return [heads // ranks + (rank < heads % ranks) for rank in range(ranks)]


def to_heads(tokens: torch.Tensor, group: Any, heads: Sequence[int], dim: int) -> torch.Tensor:
    """Exchanges own tokens of all heads for all tokens of own heads. All ranks must call it.

    Args:
        tokens: four dims, of which the third is heads; each rank has the same number of tokens.
        group: a torch process group.
        heads: the number of heads of each rank.
        dim: the dim of tokens, 0 or 1.
    """
    made: torch.Tensor = _Exchange.apply(tokens, group, tuple(heads), dim, True)  # type: ignore[no-untyped-call]
    return made


def to_tokens(made: torch.Tensor, group: Any, heads: Sequence[int], dim: int) -> torch.Tensor:
    """Exchanges all tokens of own heads for own tokens of all heads: the inverse of to_heads()."""
    tokens: torch.Tensor = _Exchange.apply(made, group, tuple(heads), dim, False)  # type: ignore[no-untyped-call]
    return tokens


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, given: torch.Tensor, group: Any, heads: Any, dim: int, splits_heads: bool
    ) -> torch.Tensor:
        ctx.how = (group, heads, dim)
        ctx.back = to_tokens if splits_heads else to_heads
        parts = torch.split(given, heads, _HEADS) if splits_heads else given.chunk(len(heads), dim)
        return _swap(parts, group, heads, joined=dim if splits_heads else _HEADS)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient, *ctx.how), None, None, None, None


def _swap(
    parts: Sequence[torch.Tensor], group: Any, heads: Sequence[int], joined: int
) -> torch.Tensor:
    """Sends each rank its part and concatenates the received parts along dim `joined`."""
    own = parts[dist.get_rank(group)]
    shapes = []
    for count in heads:
        shape = list(own.shape)
        if joined == _HEADS:
            shape[_HEADS] = count
        shapes.append(shape)
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    got = sent.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], group=group)
    pieces = [one.view(shape) for one, shape in zip(torch.split(got, sizes), shapes, strict=True)]
    return torch.cat(pieces, joined)


class DistributedAttention(torch.nn.Module):
    """Attention over whole sequences that are cut among ranks.

    The inputs are a rank's own tokens of all heads. `local_attention` gets all tokens of some
    heads; each rank has different heads.

    Args:
        local_attention: called with query, key and value, [batch, tokens, heads, size] (or tokens
            first), and forward()'s further arguments.
        sequence_process_group: a torch process group; its ranks have the parts in rank order.
        scatter_idx: must be 2, the dim of heads.
        gather_idx: 0 or 1, without effect: forward()'s `batch_dim_idx` sets the dim of tokens.
        sp_stream: accepted, without effect: copies do not overlap with compute.
        num_kv_heads: the number of key and value heads; default: the heads in `key`.

    Raises:
        ConfigError: scatter_idx or gather_idx is wrong.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        local_attention: Any,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != _HEADS or gather_idx not in (0, 1):
            raise ConfigError(
                f"[deepspeed::DistributedAttention] scatter_idx is {scatter_idx} and gather_idx is "
                f"{gather_idx}; allowed: scatter_idx 2 (heads), gather_idx 0 or 1 (tokens)"
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads

    def forward(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes the attention. Inputs and output are a rank's own tokens of all heads.

        Args:
            query, key, value: [batch, own tokens, heads, size], or tokens first.
            batch_dim_idx: 1 if tokens are first, else 0.
            rotary_pos_emb: must be None: rotate queries and keys before the call.
            args, kwargs: passed to the local attention.

        Raises:
            ConfigError: there are fewer key and value heads than ranks, or the number of query
                heads is not a multiple of the number of key and value heads.
        """
        if batch_dim_idx not in (0, 1):
            self._fail(f"batch_dim_idx is {batch_dim_idx}; allowed: 0, 1")
        if rotary_pos_emb is not None:
            self._fail(
                "rotary_pos_emb is not supported: rotate queries and keys before the call, with "
                "the position of each token in its whole sequence"
            )
        dim, ranks = 1 - batch_dim_idx, dist.get_world_size(self.spg)
        groups = self.num_kv_heads or key.shape[_HEADS]
        if query.dim() != 4 or groups < ranks or query.shape[_HEADS] % groups:
            self._fail(
                f"queries are {list(query.shape)}, with {groups} key and value heads on {ranks} "
                f"ranks; allowed: four dims, at least as many key and value heads as ranks, and a "
                f"number of query heads that is a multiple of the number of key and value heads"
            )
        parts = [
            to_heads(one, self.spg, self._heads(one, groups, ranks), dim)
            for one in (query, key, value)
        ]
        made = self.local_attn(*parts, *args, **kwargs)
        return to_tokens(made, self.spg, self._heads(query, groups, ranks), dim)

    def _heads(self, tensor: torch.Tensor, groups: int, ranks: int) -> list[int]:
        each = tensor.shape[_HEADS] // groups
        return [each * count for count in shares(groups, ranks)]

    def _fail(self, text: str) -> None:
        raise ConfigError(f"[deepspeed::DistributedAttention] {text}")
