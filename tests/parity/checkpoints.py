"""A second reader of checkpoints, from docs/formats.md alone, and what is compared with it."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def manifest_of(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint.json").read_text())


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Every tensor by role and name, put together of its slices."""
    manifest = manifest_of(folder)
    files = [(folder / file["name"]).read_bytes() for file in manifest["files"]]
    found = {}
    for tensor in manifest["tensors"]:
        dtype = DTYPES[tensor["dtype"]]
        whole = torch.zeros(math.prod(tensor["shape"]), dtype=dtype)
        covered = 0
        for begin, end, file, offset in tensor["slices"]:
            size = (end - begin) * dtype.itemsize
            part = bytearray(files[file][offset : offset + size])
            whole[begin:end] = torch.frombuffer(part, dtype=dtype)
            covered += end - begin
        assert covered == whole.numel()
        rank = f"@rank{tensor['rank']}" if "rank" in tensor else ""
        name = f"{tensor['role']}/{tensor['name']}{rank}"
        found[name] = whole.view(tensor["shape"])
    return found


def state_of(folder: pathlib.Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The training state: what must be the same under every layout."""
    manifest = manifest_of(folder)
    tensors = {k: v for k, v in tensors_of(folder).items() if not k.startswith("rng/")}
    return tensors, {"state": manifest["state"], "optimizer": manifest["front"]["optimizer"]}


def assert_same_state(one: pathlib.Path, other: pathlib.Path) -> None:
    (ours, numbers), (theirs, others) = state_of(one), state_of(other)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different, different
    assert numbers == others
