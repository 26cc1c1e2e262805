"""The Python standard library's sources as bytes: text that every machine has."""

from __future__ import annotations

import pathlib
import sysconfig

import torch
from torch.utils.data import Dataset


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Pieces of `length` bytes; a byte is a token. The labels are the piece itself."""

    def __init__(self, length: int = 64, first: int = 0, count: int = 256) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b""
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= (first + count) * length:
                break
        begin = first * length
        values = torch.frombuffer(
            bytearray(text[begin : begin + count * length]), dtype=torch.uint8
        )
        self._pieces = values.long().view(-1, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self._pieces[index]
        return {
            "input_ids": piece,
            "labels": piece.clone(),
            "attention_mask": torch.ones_like(piece),
        }
