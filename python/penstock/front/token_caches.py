"""Moves the tokens that transformers' caches hold to the tier of `offload.cache`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from penstock._native import ConfigError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class MovedCaches:
    """Makes the caches that a model's blocks get in forwards without gradients use an engine's
    tier.

    Blocks get transformers' `DynamicCache` as an argument. Its layers are replaced when a block
    first gets it, so `generate()` and forwards need no other cache. Layers of linear attention,
    which keep no tokens, stay as they are.

    Args:
        caches: `core.token_caches`, which moves tokens.

    Raises:
        ConfigError: if no model of transformers can exist, so that the key has no effect.
    """

    def __init__(self, caches: Any) -> None:
        if "transformers" not in sys.modules:
            raise ConfigError(
                '[front::initialize] "offload.cache" moves the tokens that the caches of '
                "transformers hold, but this process has not imported transformers. Leave the key "
                "out"
            )
        self._caches = caches

    def watch(self, module: torch.nn.Module) -> Any:
        """Returns the handle of a hook on a block. Its remove() ends the watch."""
        plain = torch.nn.Module
        return plain.register_forward_pre_hook(module, self._look, prepend=True, with_kwargs=True)

    def _look(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            for cache in _caches_in((*args, *kwargs.values())):
                self.take_over(cache)

    def take_over(self, cache: Cache) -> None:
        """Makes the layers of a cache use the engine's tier, with the tokens that they have.

        Raises:
            ConfigError: if it is a cache of another kind, whose tokens would stay.
        """
        from transformers import cache_utils as kinds  # noqa: PLC0415

        from penstock.front import moved_layer  # noqa: PLC0415

        if cache.layer_class_to_replicate is kinds.DynamicLayer:
            cache.layer_class_to_replicate = functools.partial(moved_layer.MovedLayer, self._caches)
        moves = (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer)
        for index, layer in enumerate(cache.layers):
            if type(layer) in moves and not cache.offloading:
                cache.layers[index] = moved_layer.moved(layer, self._caches)
        some = any(isinstance(layer, moved_layer.MovedLayer) for layer in cache.layers)
        if cache.layers and not some:
            kind = type(cache.layers[0]).__name__
            raise ConfigError(
                f'[front::forward] "offload.cache" moves the tokens of a DynamicCache, but the '
                f"model got a {type(cache).__name__} of {kind}"
                f"{' that offloads by itself' if cache.offloading else ''}. Leave "
                f"cache_implementation out, or the key"
            )


def _caches_in(values: Iterable[Any]) -> Iterator[Cache]:
    from transformers.cache_utils import Cache, EncoderDecoderCache  # noqa: PLC0415

    for one in values:
        if isinstance(one, EncoderDecoderCache):
            yield one.self_attention_cache
        elif isinstance(one, Cache):
            yield one
