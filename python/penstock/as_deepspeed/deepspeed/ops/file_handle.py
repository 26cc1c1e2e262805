"""Handles that read and write tensors in files, for AsyncIOBuilder and PinMemoryBuilder."""

from __future__ import annotations

import functools
import mmap
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


_Move = tuple[Callable[..., int], int]  # the system's call and the flags to open the file with
_READ, _WRITE = (os.preadv, os.O_RDONLY), (os.pwritev, os.O_WRONLY | os.O_CREAT)


def _transfer(how: _Move, held: memoryview, path: str | int, at: int) -> None:
    """Moves all bytes between memory and a file, starting at an offset in the file."""
    done, (move, flags) = 0, how
    descriptor = os.open(path, flags, 0o644) if not isinstance(path, int) else path
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
        if not isinstance(path, int):
            os.close(descriptor)


class PinMemoryHandle:
    """Makes host tensors for transfers. Transfers need no pinned memory here."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns a vector of the example's dtype. It starts at a page boundary, for O_DIRECT."""
        if num_elem == 0:
            return torch.empty(0, dtype=example_tensor.dtype)
        pages = mmap.mmap(-1, num_elem * example_tensor.element_size())
        return torch.frombuffer(pages, dtype=example_tensor.dtype)

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

    def _begin(
        self, move: _Move, buffer: torch.Tensor, filename: str | int, file_offset: int = 0
    ) -> int:
        held = _bytes_of(buffer)
        self._pending.append(self._threads.submit(_transfer, move, held, filename, file_offset))
        return 0

    def _run(self, move: _Move, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        _transfer(move, _bytes_of(buffer), filename, file_offset)
        return 1

    # These fill the buffer from the file, or write the buffer to the file. async_*() return before
    # the transfer ends: call wait() before you use or change the buffer.
    async_pread = functools.partialmethod(_begin, _READ)
    sync_pread = functools.partialmethod(_run, _READ)
    sync_pwrite = functools.partialmethod(_run, _WRITE)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begins to write the buffer to the file, or to an open file `fd`. Returns 0."""
        target = filename if fd is None else fd
        if target is None or (filename is not None and fd is not None):
            raise TypeError("async_pwrite() needs either filename or fd")
        return self._begin(_WRITE, buffer, target, file_offset)

    def _choose(
        self,
        move: _Move,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        is_async: bool = False,
        file_offset: int = 0,
    ) -> int:
        return (self._begin if is_async else self._run)(move, buffer, filename, file_offset)

    pread = functools.partialmethod(_choose, _READ)
    pwrite = functools.partialmethod(_choose, _WRITE)

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
