"""Handles that read and write tensors in files, for AsyncIOBuilder and PinMemoryBuilder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from penstock import ConfigError, RuntimeFault


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    """Returns the memory of a tensor."""
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ConfigError(
            f"[deepspeed::aio_handle] the buffer is a tensor on {buffer.device} (contiguous: "
            f"{buffer.is_contiguous()}); pass a contiguous tensor on the CPU"
        )
    held: Any = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(held)


def _transfer(move: Callable[..., int], flags: int, held: memoryview, path: str, at: int) -> None:
    """Moves all bytes between memory and a file, starting at an offset in the file."""
    done = 0
    descriptor = os.open(path, flags, 0o644)
    try:
        while done < len(held):
            moved = move(descriptor, [held[done:]], at + done)
            if moved == 0:
                raise RuntimeFault(
                    f"[deepspeed::aio_handle] {path} ends at byte {at + done}, but {len(held)} "
                    f"bytes from byte {at} were requested"
                )
            done += moved
    finally:
        os.close(descriptor)


class PinMemoryHandle:
    """Makes host tensors for transfers. They need no pinned memory here."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns a vector without values, of the example's dtype."""
        return torch.empty(num_elem, dtype=example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Returns True. The memory is freed with the tensor."""
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns True for host tensors, all of which can be transferred."""
        return tensor.device.type == "cpu"


class AioHandle(PinMemoryHandle):
    """Reads and writes tensors in `intra_op_parallelism` threads.

    Args:
        block_size, queue_depth, single_submit, overlap_events: accepted, without effect.

    Raises:
        ConfigError: a buffer is not a contiguous tensor on the CPU.
        OSError, RuntimeFault: a transfer failed; wait() raises the errors of async_*().
    """

    def __init__(
        self,
        block_size: int = 2**20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._options = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "single_submit": single_submit,
            "overlap_events": overlap_events,
            "intra_op_parallelism": intra_op_parallelism,
        }
        self._threads = ThreadPoolExecutor(intra_op_parallelism, "aio_handle")
        self._pending: list[Future[None]] = []
        weakref.finalize(self, self._threads.shutdown)

    def __getattr__(self, name: str) -> Callable[[], Any]:
        option = name.removeprefix("get_")
        if option == name or option not in self._options:
            raise AttributeError(name)
        return lambda: self._options[option]

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Begins to fill the buffer from the file. Call wait() before you use the buffer."""
        return self._begin(os.preadv, os.O_RDONLY, buffer, filename, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Begins to write the buffer to the file. Call wait() before you change the buffer."""
        return self._begin(os.pwritev, os.O_WRONLY | os.O_CREAT, buffer, filename, file_offset)

    def _begin(
        self, move: Callable[..., int], flags: int, buffer: torch.Tensor, path: str, at: int
    ) -> int:
        held = _bytes_of(buffer)
        self._pending.append(self._threads.submit(_transfer, move, flags, held, path, at))
        return 0

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fills the buffer from the file. Returns 1."""
        _transfer(os.preadv, os.O_RDONLY, _bytes_of(buffer), filename, file_offset)
        return 1

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Writes the buffer to the file. Returns 1."""
        _transfer(os.pwritev, os.O_WRONLY | os.O_CREAT, _bytes_of(buffer), filename, file_offset)
        return 1

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Calls async_pread() or sync_pread()."""
        chosen = self.async_pread if is_async else self.sync_pread
        return chosen(buffer, filename, file_offset)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Calls async_pwrite() or sync_pwrite()."""
        chosen = self.async_pwrite if is_async else self.sync_pwrite
        return chosen(buffer, filename, file_offset)

    def wait(self) -> int:
        """Waits for all transfers that async_*() began. Returns their number.

        Raises the first error of a transfer.
        """
        begun, self._pending = self._pending, []
        errors = [one.exception() for one in begun]  # waits for each
        for error in errors:
            if error is not None:
                raise error
        return len(begun)
