"""File objects that count what is written. `deepspeed.io` exports them."""

from __future__ import annotations

import dataclasses
import time
from typing import IO, Any

from penstock import ConfigError


class BaseFileWriter:
    """A file object for torch.save(), with statistics.

    Its file is written through Python, in the order of the calls, and is complete after close().
    """

    def __init__(self, file_path: str) -> None:
        self._file_path, self._file = file_path, self._open(file_path)
        self._stats: dict[str, float] = dict.fromkeys(
            ("close", "fileno", "flush", "write", "bytes", "write_secs", "write_GB/s"), 0
        )

    def _open(self, file_path: str) -> IO[bytes] | None:
        return open(file_path, "wb")

    def file_path(self) -> str:
        return self._file_path

    def write(self, buffer: Any) -> int:
        """Writes bytes. Returns their number."""
        started, num_bytes = time.perf_counter(), memoryview(buffer).nbytes
        if self._file is not None:
            self._file.write(buffer)
        self._stats["write"] += 1
        self._stats["bytes"] += num_bytes
        self._stats["write_secs"] += time.perf_counter() - started
        return num_bytes

    def flush(self) -> None:
        self._stats["flush"] += 1
        if self._file is not None:
            self._file.flush()

    def fileno(self) -> int:
        """Returns -1: all bytes go through write()."""
        self._stats["fileno"] += 1
        return -1

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0 if self._file is None else self._file.seek(offset, whence)

    def tell(self) -> int:
        return int(self._stats["bytes"]) if self._file is None else self._file.tell()

    def close(self) -> None:
        self._stats["close"] += 1
        if self._file is not None:
            self._file.close()

    def _dump_state(self) -> None:
        """Prints the statistics."""
        spent = self._stats["write_secs"]
        self._stats["write_GB/s"] = self._stats["bytes"] / spent / 2**30 if spent else 0
        print(f"stats = {self._stats | {'path': self._file_path}}")


class PyFileWriter(BaseFileWriter):
    """Writes a file."""


class MockFileWriter(BaseFileWriter):
    """Writes nothing and only counts."""

    def _open(self, file_path: str) -> IO[bytes] | None:
        return None


@dataclasses.dataclass
class FastFileWriterConfig:
    """Options of FastFileWriter. Only num_parallel_writers is checked: it must be 1."""

    dnvme_handle: Any = None
    pinned_tensor: Any = None
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(BaseFileWriter):
    """Writes a file. It needs neither the handle nor the pinned tensor of its config.

    Raises ConfigError if num_parallel_writers is not 1.
    """

    def __init__(self, file_path: str, config: FastFileWriterConfig) -> None:
        if config.num_parallel_writers != 1:
            raise ConfigError(
                f"[deepspeed::FastFileWriter] num_parallel_writers is {config.num_parallel_writers}"
                f"; allowed: 1. To write from all ranks, call engine.save_checkpoint()"
            )
        super().__init__(file_path)
