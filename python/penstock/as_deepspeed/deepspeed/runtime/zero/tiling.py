"""Linear layers that are stored and computed in tiles, which the engine shards one by one.

The native key "tiling" does the same with a torch.nn.Linear, without a change of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..utils import partition_uniform
from .partition_parameters import GatheredParameters


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: list[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Splits a tensor into chunks with these sizes of the last dim."""
    chunks = torch.split(tensor, partitions, dim=-1)
    return tuple(one.contiguous() for one in chunks) if contiguous_split_chunks else chunks


class TiledLinear(torch.nn.Module):
    """A Linear layer in `out_splits` times `in_splits` tiles: `linears[out][in]`.

    Args:
        in_features, out_features, bias: as for torch.nn.Linear.
        in_splits, out_splits: numbers of tiles in a row and in a column.
        input_is_already_split: forward() gets a list of `in_splits` chunks.
        combine_out_splits: False to return a list of `out_splits` outputs.
        linear_cls: the class of the tiles, which gets `kwargs`, too.
        init_linear: a layer whose values are copied.

    Raises:
        RuntimeError: a number of tiles is not positive, or larger than the number of features.
    """

    linears: Any  # of type torch.nn.ModuleList, as are its entries

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., torch.nn.Module] = torch.nn.Linear,
        init_linear: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for key, number, most in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= number <= most:
                raise RuntimeError(
                    f"[deepspeed::zero.TiledLinear] {key} is {number}; allowed: 1 to {most}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        widths, heights = _sizes(self.in_parts), _sizes(self.out_parts)
        self.linears = torch.nn.ModuleList(
            torch.nn.ModuleList(
                linear_cls(width, height, bias=bias and i == in_splits - 1, **kwargs)
                for i, width in enumerate(widths)
            )
            for height in heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Returns the output, [..., out_features]; its parts if combine_out_splits is False."""
        chunks = [input_]
        if self.in_splits > 1:
            split, sizes = self._split_global_input, _sizes(self.in_parts)
            chunks = input_ if self.input_is_already_split else split(input_, sizes)
        if len(chunks) != self.in_splits:
            raise ValueError(
                f"[deepspeed::zero.TiledLinear] forward() got {len(chunks)} inputs, but in_splits "
                f"is {self.in_splits}"
            )
        outputs = []
        for out_id, row in enumerate(self.linears):
            made = None
            for in_id, (tile, chunk) in enumerate(zip(row, chunks, strict=True)):
                made = self._reduce_local_output(in_id, out_id, made, tile(chunk))
            outputs.append(made)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    # Methods that subclasses may override.

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Any:
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(tuple(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copies the values of a whole layer (with ZeRO-3, rank 0's). All ranks must call it.

        Raises ValueError if the shapes differ, or only one of the layers has a bias.
        """
        shape, bias = (self.out_features, self.in_features), getattr(other, "bias", None)
        if tuple(other.weight.shape) != shape or (bias is not None) != self.use_bias:
            raise ValueError(
                f"[deepspeed::zero.TiledLinear] the weight has shape {tuple(other.weight.shape)} "
                f"and the layer {'no' if bias is None else 'a'} bias; needed: {shape}, "
                f"{'a' if self.use_bias else 'no'} bias"
            )
        with GatheredParameters([other.weight, bias]):
            for row, (top, end) in zip(
                self.linears, itertools.pairwise(self.out_parts), strict=True
            ):
                for tile, (left, right) in zip(row, itertools.pairwise(self.in_parts), strict=True):
                    _copy(tile.weight, other.weight[top:end, left:right])
                if bias is not None:
                    _copy(row[-1].bias, bias[top:end])


def _sizes(bounds: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(bounds)]


def _copy(param: Any, values: torch.Tensor) -> None:
    with GatheredParameters(param, modifier_rank=0):
        param.copy_(values)


class TiledLinearReturnBias(TiledLinear):
    """The same for a `linear_cls` that returns (output, bias) and does not add the bias."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        if current_out is None:
            return output, bias
        return current_out[0] + output, current_out[1] if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = super()._combine_output_splits([output for output, _ in outputs])
        return whole, super()._combine_output_splits(biases) if biases else None
