"""Attention of sequences that ranks have parts of (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock import ConfigError

_HEADS = 2  # the dim of heads, in [batch, tokens, heads, size] and [tokens, batch, heads, size]


def shares(heads: int, ranks: int) -> list[int]:
    """How many heads each rank gets; the first ones have one more where they do not divide."""
    return [heads // ranks + (rank < heads % ranks) for rank in range(ranks)]


def to_heads(
    tokens: torch.Tensor, group: Any, heads: Sequence[int], dim: int
) -> torch.Tensor:  # fmt: skip
    """Own tokens of all heads -> all tokens of own heads. All ranks of the group call it.

    Args:
        tokens: four dimensions, heads the third; as many tokens on each rank.
        group: a process group of torch.
        heads: how many each rank gets.
        dim: of the tokens, 0 or 1.
    """
    made: torch.Tensor = _ToHeads.apply(tokens, group, tuple(heads), dim)  # type: ignore[no-untyped-call]
    return made


def to_tokens(
    heads_of: torch.Tensor, group: Any, heads: Sequence[int], dim: int
) -> torch.Tensor:  # fmt: skip
    """All tokens of own heads -> own tokens of all heads; the other way of `to_heads()`."""
    made: torch.Tensor = _ToTokens.apply(heads_of, group, tuple(heads), dim)  # type: ignore[no-untyped-call]
    return made


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: Any, heads: Any, dim: int) -> torch.Tensor:
        ctx.how = (group, heads, dim)
        return _swap(torch.split(tokens, heads, _HEADS), group, heads, joined=dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        group, heads, dim = ctx.how
        return to_tokens(gradient, group, heads, dim), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, group: Any, heads: Any, dim: int) -> torch.Tensor:
        ctx.how = (group, heads, dim)
        return _swap(made.chunk(len(heads), dim), group, heads, joined=_HEADS)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        group, heads, dim = ctx.how
        return to_heads(gradient, group, heads, dim), None, None, None


def _swap(
    parts: Sequence[torch.Tensor], group: Any, heads: Sequence[int], joined: int
) -> torch.Tensor:
    """Sends each rank its part, and joins what they send."""
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
    """Attention over whole sequences, of ranks that have a part of each.

    Each rank gives its tokens of all heads; `local_attention` sees all tokens of some heads, on
    each rank of others.

    Args:
        local_attention: called with query, key and value, [batch, tokens, heads, size] (or tokens
            first), and what else forward() is given.
        sequence_process_group: a process group of torch; its ranks have the parts in their order.
        scatter_idx: 2, the dim of heads.
        gather_idx: the dim of tokens; which one it is follows from forward()'s `batch_dim_idx`.
        sp_stream: accepted, without effect: nothing overlaps.
        num_kv_heads: of keys and values, where the number divides by no ranks; default: the key's.

    Raises:
        ConfigError: another scatter_idx.
    """

    def __init__(  # noqa: PLR0913 - as DeepSpeed's
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
                f"[deepspeed::DistributedAttention] scatter_idx is {scatter_idx} and gather_idx "
                f"{gather_idx}; allowed: 2 (heads) and 0 or 1 (tokens)"
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads

    def forward(  # noqa: PLR0913 - as DeepSpeed's
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Own tokens of all heads, in and out.

        Args:
            query, key, value: [batch, own tokens, heads, size], or tokens first.
            batch_dim_idx: 0, or 1 where tokens are first.
            rotary_pos_emb: must be None: turn queries and keys before.
            args, kwargs: for the local attention.

        Raises:
            ConfigError: heads that do not divide among the ranks by groups of keys and values, and
                fewer of those than ranks.
        """
        if batch_dim_idx not in (0, 1):
            self._fail(f"batch_dim_idx is {batch_dim_idx}; allowed: 0, 1")
        if rotary_pos_emb is not None:
            self._fail("rotary_pos_emb: turn queries and keys before, by each token's position")
        dim, ranks = 1 - batch_dim_idx, dist.get_world_size(self.spg)
        groups = self.num_kv_heads or key.shape[_HEADS]
        if query.dim() != 4 or groups < ranks or query.shape[_HEADS] % groups:
            self._fail(
                f"queries are {list(query.shape)}, with {groups} heads of keys and values, and "
                f"there are {ranks} ranks: four dimensions, as many such heads as ranks or more, "
                f"and a multiple of them of queries are needed"
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
