"""Copies of memory, as lanes make them."""

from __future__ import annotations

import ctypes
import time

import torch

from penstock.bench.setting import Setting

_BYTES = 64 << 20
PART = 1 << 20


class HostCopy:
    """Copies of host memory on the calling thread, without Python's lock, a part at a time."""

    def __init__(self) -> None:
        self._from, self._to = (torch.ones(_BYTES, dtype=torch.uint8) for _ in range(2))
        self._at = 0
        self.copied = 0.0  # bytes so far

    def next(self) -> None:
        """One part."""
        target, source = (one.data_ptr() + self._at for one in (self._to, self._from))
        ctypes.memmove(target, source, PART)
        self._at = (self._at + PART) % _BYTES
        self.copied += PART

    def rate(self, seconds: float) -> float:
        """Bytes/s over so long at least."""
        before, begin = self.copied, time.perf_counter()
        while (takes := time.perf_counter() - begin) < seconds:
            self.next()
        return (self.copied - before) / takes

    def whole(self) -> float:
        """Bytes/s of copying all of it once."""
        begin = time.perf_counter()
        for _ in range(_BYTES // PART):
            self.next()
        return _BYTES / (time.perf_counter() - begin)


def device_host(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Bytes/s copied to and from the device in turn; on the CPU from memory to memory."""
    if setting.on_host:
        copy = HostCopy()
        return {"device_host": setting.ranks.samples(copy.whole, seconds)}
    there = torch.ones(_BYTES, dtype=torch.uint8, device=setting.device)
    here = torch.ones(_BYTES, dtype=torch.uint8).pin_memory()

    def run() -> float:
        setting.wait()
        begin = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        setting.wait()
        return 2.0 * _BYTES / (time.perf_counter() - begin)

    return {"device_host": setting.ranks.samples(run, seconds)}
