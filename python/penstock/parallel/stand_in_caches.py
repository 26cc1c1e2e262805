"""Key and value caches of layers that another stage of a pipeline computes.

A model reads the number of cached tokens from the first layer of a cache (transformers' Cache), but
only the stage that computes a layer has its keys and values. On the other stages, each layer that
runs without values caches one zero per token, so the cache has the same number of tokens on every
stage.
"""

import dataclasses
from typing import Any

import torch

from penstock.parallel.stand_in import like


@dataclasses.dataclass(frozen=True)
class CachedTokens:
    """The tokens that one call added to a layer of a cache.

    Attributes:
        owner: index of the cache among the caches in the call's arguments.
        layer: index of the layer in the cache.
        batch: number of sequences.
        tokens: number of tokens per sequence.
    """

    owner: int
    layer: int
    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def put_in(self, objects: list[Any]) -> None:
        """Adds zeros for the tokens to the layer. `objects`: those of the arguments."""
        zeros = torch.zeros(self.batch, 1, self.tokens, 1, dtype=self.dtype, device=self.device)
        caches_in(objects)[self.owner].update(zeros, zeros, self.layer)


def watch(objects: list[Any]) -> list[CachedTokens]:
    """Makes the caches among `objects` record updates, and leave their layers as they are. The
    caller restores the objects' fields afterwards. Returns the list to which updates are added."""
    found: list[CachedTokens] = []
    for index, one in enumerate(caches_in(objects)):
        one.update = _Recorder(one, index, found)
    return found


def caches_in(objects: list[Any]) -> list[Any]:
    """Returns the objects that look like transformers' Cache."""
    return [
        one
        for one in objects
        if isinstance(getattr(one, "layers", None), list)
        and callable(getattr(one, "update", None))
        and callable(getattr(one, "get_seq_length", None))
    ]


class _Recorder:
    """Replaces the `update` of a cache while a layer runs without values."""

    def __init__(self, cache: Any, owner: int, found: list[CachedTokens]) -> None:
        self._cache, self._owner, self._found = cache, owner, found

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of earlier tokens and of these, without values.

        Args:
            keys: [batch, heads, tokens, size].
            values: [batch, heads, tokens, size].
            layer_idx: index of the layer in the cache.
        """
        self._found.append(
            CachedTokens(
                self._owner, layer_idx, keys.shape[0], keys.shape[-2], keys.dtype, keys.device
            )
        )
        layers = self._cache.layers
        layer = layers[layer_idx] if layer_idx < len(layers) else None
        held = getattr(layer, "keys", None)
        if held is None:  # a layer without tokens, or one whose tokens rest in the engine
            earlier = 0 if layer is None else layer.get_mask_sizes(0)[0]
        else:
            earlier = 0 if held.ndim < 2 else held.shape[-2]
        return _longer(keys, earlier), _longer(values, earlier)


def _longer(one: torch.Tensor, tokens: int) -> torch.Tensor:
    shape = [*one.shape[:-2], one.shape[-2] + tokens, one.shape[-1]]
    return like(torch.Size(shape), one.dtype, one.device)
