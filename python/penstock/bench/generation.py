"""Measures the speed of what a rank computes when it generates a token of each sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from penstock.bench.arguments import HEAD
from penstock.bench.setting import Setting

# Weights, or keys and values, of this size together do not fit into caches.
_BYTES = 256 << 20
_ROWS, _SHARING, _SEQUENCES = 16, 8, 8


def _timed(setting: Setting, work: Callable[[], object]) -> float:
    setting.wait()
    begin = time.perf_counter()
    work()
    setting.wait()
    return time.perf_counter() - begin


def rows(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures products with one row and with 16 rows, and the attention of one token.

    The weights are [4 width, width]. In the attention, 8 heads share keys and values, as in models
    with grouped queries.
    """
    place: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    size = torch.empty(0, dtype=setting.dtype).element_size()
    numel = 4 * setting.width**2
    weights = [
        torch.full((4 * setting.width, setting.width), 0.01, **place)
        for _ in range(max(1, _BYTES // (numel * size)))
    ]
    given = {count: torch.ones(count, setting.width, **place) for count in (1, _ROWS)}

    def product(count: int) -> float:
        def work() -> None:
            for weight in weights:
                functional.linear(given[count], weight)

        return _timed(setting, work)

    tokens = max(1, _BYTES // (2 * size * _SEQUENCES * HEAD))
    cached = torch.full((_SEQUENCES, 1, tokens, HEAD), 0.01, **place)
    query = torch.ones(_SEQUENCES, _SHARING, 1, HEAD, **place)

    def attention() -> float:
        return _timed(
            setting,
            lambda: functional.scaled_dot_product_attention(query, cached, cached, enable_gqa=True),
        )

    agreed, values = setting.ranks, len(weights) * numel
    with torch.no_grad():
        return {
            "one_row": agreed.samples(lambda: values * size / product(1), seconds / 3),
            "rows_16": agreed.samples(lambda: 2 * values * _ROWS / product(_ROWS), seconds / 3),
            "attention": agreed.samples(
                lambda: 2 * cached.numel() * size / attention(), seconds / 3
            ),
        }
