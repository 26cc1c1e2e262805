"""What Weights & Biases leaves on this machine, by its own messages."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any


def _records(data: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB of pieces with checksum, length and type."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def flush() -> None:
    """In the process of the run: `finish()` returns up to a moment before its file is whole."""
    import wandb  # noqa: PLC0415 - takes a second

    wandb.teardown()


def messages(path: pathlib.Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415 - as above

    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def rows(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """What was logged, each time with the numbers of a step."""
    for record in messages(path):
        items = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
        if items:
            yield {key: json.loads(value) for key, value in items.items()}
