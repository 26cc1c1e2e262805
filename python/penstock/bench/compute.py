"""Measures the compute speed of a rank, and how much simultaneous copies slow it down."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn
from torch.nn import functional

from penstock.bench.arguments import HEAD, SEQUENCE
from penstock.bench.memory import PART, HostCopy
from penstock.bench.setting import Setting
from penstock.monitor.flops import Counter

_WINDOW_S = 0.06  # minimum duration of the matrix products in one timing
_SIZE = 512  # rows and columns of the matrices


class Block(nn.Module):
    """A transformer block with norms before attention and before the two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.keys, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [sequences, tokens, width] to the same shape."""
        parts = self.keys(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + down


def flops(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures the FLOP/s of a block's forward and backward. A backward counts as two forwards."""
    block = Block(setting.width).to(setting.device, setting.dtype)
    length = min(setting.tokens, SEQUENCE)
    given = torch.randn(setting.tokens // length, length, setting.width)
    given = given.to(setting.device, setting.dtype).requires_grad_()
    gradient = torch.ones_like(given)
    with Counter() as counter:
        block(given)

    def run() -> float:
        block.zero_grad()
        given.grad = None
        setting.wait()
        begin = time.perf_counter()
        block(given).backward(gradient)
        setting.wait()
        return 3.0 * float(counter.total) / (time.perf_counter() - begin)

    return {"flops": setting.ranks.samples(run, seconds)}


class _Products:
    """A run of matrix products that takes at least _WINDOW_S."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._matrices = [torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(3)]
        self.count = 1
        while (takes := self.seconds()) < _WINDOW_S:
            self.count = max(2 * self.count, int(self.count * _WINDOW_S / max(takes, 1e-6)))

    def seconds(self) -> float:
        left, right, out = self._matrices
        begin = time.perf_counter()
        for _ in range(self.count):
            torch.mm(left, right, out=out)
        return time.perf_counter() - begin


def _both(products: _Products, copy: HostCopy) -> tuple[float, float]:
    """Runs the products while a thread copies. Returns the products' time and the bytes copied."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        while not over.is_set():
            copy.next()
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    before = copy.copied
    takes = products.seconds()
    copied = copy.copied - before
    over.set()
    thread.join()
    return takes, copied


def overlap(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures the share of a copying thread's time that does not slow down matrix products.

    While the products run, the thread copies some bytes. Without the products, it needs `lane`
    seconds for these bytes. The copies then prolong the products by (1 - overlap) * lane. Devices
    are not measured, because they have separate copy engines.
    """
    if not setting.on_host:
        return {}
    copy = HostCopy()
    with torch.no_grad():
        products = _Products(setting.dtype)

        def run() -> float:
            alone = products.seconds()
            setting.ranks.agree(True)
            rate = copy.rate(_WINDOW_S)
            setting.ranks.agree(True)
            takes, copied = _both(products, copy)
            return 1.0 - (takes - alone) * rate / max(copied, PART)

        return {"overlap": setting.ranks.samples(run, seconds)}
