"""Measures memory copies of the kind that lanes make."""

from __future__ import annotations

import ctypes
import time

import torch

from penstock.bench.setting import Setting

_BYTES = 64 << 20
PART = 1 << 20


class HostCopy:
    """Copies host memory on the calling thread, PART bytes at a time, without the GIL."""

    def __init__(self) -> None:
        self._from, self._to = (torch.ones(_BYTES, dtype=torch.uint8) for _ in range(2))
        self._at = 0
        self.copied = 0.0  # bytes so far

    def next(self) -> None:
        """Copies the next PART bytes."""
        target, source = (one.data_ptr() + self._at for one in (self._to, self._from))
        ctypes.memmove(target, source, PART)
        self._at = (self._at + PART) % _BYTES
        self.copied += PART

    def rate(self, seconds: float) -> float:
        """Copies for at least `seconds`. Returns bytes/s."""
        before, begin = self.copied, time.perf_counter()
        while (takes := time.perf_counter() - begin) < seconds:
            self.next()
        return (self.copied - before) / takes

    def whole(self) -> float:
        """Copies the whole buffer once. Returns bytes/s."""
        begin = time.perf_counter()
        for _ in range(_BYTES // PART):
            self.next()
        return _BYTES / (time.perf_counter() - begin)


def device_host(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Measures the bytes/s of alternating copies to and from the device.

    On the CPU, both copies are from host memory to host memory.
    """
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
