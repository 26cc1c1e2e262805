"""Layers of transformers' caches whose tokens rest in an engine. Imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class MovedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer like DynamicLayer, whose tokens rest in an engine.

    There are no attributes `keys` and `values`: update() alone returns them. A copy
    (`copy.deepcopy()`) has its own tokens.

    Args:
        caches: `core.token_caches`.
        window: each token attends to itself and the window - 1 tokens before it. 0: to all.
        passed: number of tokens that have left the window before.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, caches: Any, window: int = 0, passed: int = 0) -> None:
        self.is_initialized = False
        self._caches, self._tokens, self._passed = caches, caches.make(window), passed

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'"offload.cache" keeps the tokens of this cache in the engine, so its layers have no '
            f'"{name}"; only update() returns keys and values'
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MovedLayer:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._tokens = self._caches.make(getattr(self, "sliding_window", 0))
        made._tokens.copy(self._tokens)
        memo[id(self)] = made
        return made

    def __getstate__(self) -> Any:
        raise TypeError(
            'a cache whose tokens "offload.cache" keeps in the engine cannot be pickled'
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens: [batch, heads, tokens, size]. Returns all to which they attend."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        made: tuple[torch.Tensor, torch.Tensor] = self._caches.add(
            self._tokens, key_states, value_states
        )
        return made

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self._tokens.tokens) + self._passed

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._tokens.clear()
        self._passed = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._tokens.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop() got {tokens_to_remove}. Pass minus the number of tokens to remove"
            )
        self._tokens.remove_last(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._tokens.select(torch.arange(self._tokens.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._tokens.batch > 0:
            batch = torch.arange(self._tokens.batch, device=self.device)
            self._tokens.select(batch[indices])


class MovedWindow(MovedLayer):  # type: ignore[no-untyped-call]
    """A layer like DynamicSlidingWindowLayer, whose tokens rest in an engine."""

    is_sliding = True

    def __init__(self, caches: Any, window: int, passed: int = 0) -> None:
        super().__init__(caches, window, passed)
        self.sliding_window, self.record_past = window, False

    def activate_past_recording(self) -> None:
        """Keeps the tokens of later forwards until crop(), which can then remove them."""
        self.record_past = True
        self._tokens.keep_past()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        earlier = min(self.get_seq_length(), self.sliding_window - 1)
        return earlier + query_length, self.get_seq_length() - earlier

    def get_max_length(self) -> int:
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        if self.get_seq_length() >= self.sliding_window and not self.record_past:
            raise RuntimeError(
                "crop() got a layer whose sliding window has passed its first tokens. Call "
                "activate_past_recording() before the forwards"
            )
        super().crop(tokens_to_remove)


def moved(layer: Any, caches: Any) -> MovedLayer:
    """Returns a layer with the tokens of a DynamicLayer or a DynamicSlidingWindowLayer."""
    tokens, count = layer.get_seq_length(), 0
    if tokens > 0:
        count = layer.keys.shape[-2]
    window = getattr(layer, "sliding_window", None)
    made = MovedLayer(caches)
    if window is not None:
        made = MovedWindow(caches, window, tokens - count)
        if layer.record_past:
            made.activate_past_recording()
    if count > 0:
        made.update(layer.keys, layer.values)
    return made
