"""Moves the tokens that transformers' caches hold to the tier of `offload.cache`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock._native import ConfigError
from penstock.front import module_tree
from penstock.front.forward_guard import Forward, Hook

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
        inference: whether no forward of the engine has a backward.

    Raises:
        ConfigError: if no model of transformers can exist, so that the key has no effect.
    """

    def __init__(self, caches: Any, inference: bool) -> None:
        if "transformers" not in sys.modules:
            raise ConfigError(
                '[front::initialize] "offload.cache" moves the tokens that the caches of '
                "transformers hold, but this process has not imported transformers. Leave the key "
                "out"
            )
        self._caches, self._inference = caches, inference
        self._seen = weakref.WeakKeyDictionary[Any, int]()  # cache -> number of its layers

    def watch(self, module: torch.nn.Module) -> Any:
        """Watches a block, or the model. remove() of the result ends this."""
        if module_tree.is_compiled_in_place(module):
            return Forward(module, self._around)
        plain, look = torch.nn.Module, Hook(module, self._look)
        return plain.register_forward_pre_hook(module, look, prepend=True, with_kwargs=True)

    def _around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._look(args, kwargs)
        return forward(*args, **kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self._inference:
            return
        for cache in _caches_in((*args, *kwargs.values())):
            if self._seen.get(cache) != len(cache.layers):
                self.take_over(cache)
                self._seen[cache] = len(cache.layers)

    def take_over(self, cache: Cache) -> None:
        """Makes the layers of a cache use the engine's tier, with the tokens that they have.

        Raises:
            ConfigError: if it is a cache of another kind, whose tokens would stay.
        """
        from transformers import cache_utils as kinds  # noqa: PLC0415

        from penstock.front import moved_layer  # noqa: PLC0415

        if cache.layer_class_to_replicate is kinds.DynamicLayer and not cache.offloading:
            # A deep copy of the cache keeps a function as it is.
            def make(*given: Any, **named: Any) -> Any:
                return moved_layer.MovedLayer(self._caches, *given, **named)

            cache.layer_class_to_replicate = cast(Any, make)
        moves = (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer)
        for index, layer in enumerate(cache.layers):
            if type(layer) in moves and not cache.offloading:
                cache.layers[index] = moved_layer.moved(layer, self._caches)
        some = any(isinstance(layer, moved_layer.MovedLayer) for layer in cache.layers)
        if cache.offloading or (cache.layers and not some):
            kind = type(cache.layers[0]).__name__ if cache.layers else "DynamicLayer"
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
