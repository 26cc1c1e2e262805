"""From one format to another: finds out what the source is, and writes what is asked for."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from penstock._native import ConfigError
from penstock.conversion import dcp, deepspeed, state_dicts, writers
from penstock.conversion.foreign import Foreign
from penstock.conversion.options import FORMATS, Options

_MANIFEST = "checkpoint.json"


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
) -> str:
    """Converts a checkpoint; runs no code from it, and holds one tensor at a time.

    Args:
        source: a checkpoint of ours (or a folder of them), of DeepSpeed (ZeRO 1, 2, 3, universal),
            a file of torch.save() or safetensors, a folder of Hugging Face or of
            torch.distributed.checkpoint.
        out: for "penstock" a folder of checkpoints, where it becomes "step-N"; for "dcp" an empty
            folder; for "safetensors" a folder, the weights as from_pretrained() loads them; for
            "torch" a file, the weights as a state dict (which is in memory as a whole).
        options: see there.

    Returns:
        What was written.

    Raises:
        ConfigError: what cannot be converted.
        RuntimeFault: a file is damaged or missing.
    """
    wanted = options or Options()
    if wanted.to not in FORMATS:
        raise ConfigError(f'[convert] to is "{wanted.to}"; one of {", ".join(FORMATS)}')
    path, target = pathlib.Path(source), pathlib.Path(out)
    if not path.exists():
        raise ConfigError(f'[convert] there is no "{path}"')
    if (path / _MANIFEST).is_file() or any(path.glob(f"*/{_MANIFEST}")):
        if wanted.to == "penstock":
            raise ConfigError(f'[convert] "{path}" is a checkpoint of Penstock: load() takes it')
        held = writers.of_ours(path, wanted.tag, wanted.say)
        return writers.write_others(held, target, wanted)
    found = _read(path, wanted.tag, wanted.key, wanted.inert)
    for note in found.notes:
        wanted.say(note)
    if wanted.to == "penstock":
        return writers.write_ours(found, target, str(path), wanted.say)
    return writers.write_others(writers.of_foreign(found), target, wanted)


def _read(path: pathlib.Path, tag: str, key: str, inert: Sequence[str]) -> Foreign:
    if path.is_file():
        return state_dicts.read_file(path, inert, key)
    folder = deepspeed.find(path, tag)
    if folder is not None:
        return deepspeed.read(folder, inert)
    inner = path / tag if tag else path
    if dcp.is_one(inner):
        return dcp.read(inner, key)
    if state_dicts.is_hf(inner):
        return state_dicts.read_hf(inner, inert)
    raise ConfigError(
        f'[convert] "{inner}" is no checkpoint that is known: neither of Penstock nor of DeepSpeed '
        f"(latest, *_model_states.pt, zero/), of torch.distributed.checkpoint (.metadata) or of "
        f"Hugging Face (model.safetensors, pytorch_model.bin, or an index of them)"
    )


def parse_dtype(text: str) -> Any:
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if text not in named:
        raise ConfigError(f'[convert] dtype is "{text}"; one of {", ".join(named)}')
    return named[text]
