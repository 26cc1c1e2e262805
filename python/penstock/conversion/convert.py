"""Converts checkpoints: detects the format of the source and writes another format."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import deepspeed, pickles, state_dicts, writers
from penstock.conversion.foreign import Foreign
from penstock.conversion.options import FORMATS, Options

_MANIFEST = "checkpoint.json"


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
) -> str:
    """Converts a checkpoint. It runs no code from the source, and holds one tensor at a time.

    Args:
        source: a checkpoint of Penstock (or a folder of them) or DeepSpeed (ZeRO 1, 2, 3,
            universal), a file of torch.save() or safetensors, or a folder that Hugging Face's
            libraries or torch.distributed.checkpoint wrote.
        out: for "penstock" a folder of checkpoints, which gets a new "step-N"; for "dcp" an empty
            folder; for "safetensors" a folder for the weights, in files named as Hugging Face
            names them (no config.json); for "torch" a file for a state dict, which is held in
            memory.
        options: see Options.

    Returns:
        The path that was written.

    Raises:
        ConfigError: if the source or the options cannot be converted.
        RuntimeFault: if a file is damaged or missing.
    """
    wanted = options or Options()
    if wanted.to not in FORMATS:
        raise ConfigError(f'[convert] to is "{wanted.to}"; allowed: {", ".join(FORMATS)}')
    path, target = pathlib.Path(source), pathlib.Path(out)
    if not path.exists():
        raise ConfigError(f'[convert] there is no "{path}"')
    if "/" in wanted.tag:
        raise ConfigError(f'[convert] the tag "{wanted.tag}" is not the name of a folder')
    if target.exists() and (target.samefile(path) or not (target.is_file() or target.is_dir())):
        raise ConfigError(
            f'[convert] cannot write "{target}": it is the source, or neither a file nor a folder'
        )
    if target.exists() and target.is_dir() == (wanted.to == "torch"):
        raise ConfigError(
            f'[convert] "{target}" is a {"folder" if target.is_dir() else "file"}, but '
            f'"{wanted.to}" writes a {"file" if wanted.to == "torch" else "folder"}'
        )
    ours = (path / _MANIFEST).is_file() or any(path.glob(f"*/{_MANIFEST}"))
    with _named(path):
        return _convert(path, target, wanted, ours)


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Turns every exception except Penstock's own into a RuntimeFault that names the source."""
    try:
        yield
    except (ConfigError, RuntimeFault):
        raise
    except (OSError, MemoryError) as error:
        why = str(error) or "there is not enough memory"
        raise RuntimeFault(f'[convert] cannot convert "{path}": {why}') from error
    except Exception as error:
        raise RuntimeFault(
            f'[convert] "{path}" does not have the layout of its detected format: {error!r}'
        ) from error


def state_dict(
    source: str | os.PathLike[str], tag: str = "", trained_only: bool = False
) -> dict[str, torch.Tensor]:
    """Reads the weights and buffers of a checkpoint into memory, on the CPU.

    Args:
        source: the same sources as in convert().
        tag: the name of a checkpoint in the source; "" for the newest.
        trained_only: leave out parameters that the optimizer does not have.

    Raises:
        ConfigError: the source cannot be converted.
        RuntimeFault: a file is damaged or missing.
    """
    path = pathlib.Path(source)
    with _named(path):
        if (path / _MANIFEST).is_file() or any(path.glob(f"*/{_MANIFEST}")):
            return writers.whole(writers.of_ours(path, tag, lambda line: None), trained_only)
        found = _read(path, Options(tag=tag))
        found.finish()
        return writers.whole(writers.of_foreign(found), trained_only)


def _convert(path: pathlib.Path, target: pathlib.Path, wanted: Options, ours: bool) -> str:
    if ours:
        if wanted.to == "penstock":
            raise ConfigError(
                f'[convert] "{path}" is already a checkpoint of Penstock: load it with load()'
            )
        _refuse_without_effect(wanted, "Penstock", {"tag"})
        held = writers.of_ours(path, wanted.tag, wanted.say)
        return writers.write_others(held, target, wanted)
    found = _read(path, wanted)
    found.finish()
    for note in found.notes:
        wanted.say(note)
    if wanted.to == "penstock":
        return writers.write_ours(found, target, str(path), wanted.say)
    return writers.write_others(writers.of_foreign(found), target, wanted)


def _refuse_without_effect(wanted: Options, kind: str, takes: set[str]) -> None:
    """Raises ConfigError for an option that is set and has no effect.

    `takes` names the options that a source of this kind uses.
    """
    if wanted.to in ("safetensors", "torch"):
        takes = takes | {"dtype"}
    for name in ("tag", "key", "inert", "dtype", "rules"):
        if getattr(wanted, name) and name not in takes:
            raise ConfigError(
                f"[convert] {name} has no effect on a conversion from {kind} to {wanted.to}: leave "
                f"it out"
            )


def _read(path: pathlib.Path, wanted: Options) -> Foreign:
    if path.is_file():
        _refuse_without_effect(wanted, "a file", {"key", "inert"})
        return state_dicts.read_file(path, wanted.inert, wanted.key)
    folder = deepspeed.find(path, wanted.tag)
    if folder is not None:
        _refuse_without_effect(wanted, "DeepSpeed", {"tag", "inert", "rules"})
        return deepspeed.read(folder, wanted.inert, wanted.rules)
    inner = path / wanted.tag if wanted.tag else path
    if (inner / pickles.METADATA).is_file():
        _refuse_without_effect(wanted, "torch.distributed.checkpoint", {"tag", "key"})
        from penstock.conversion import dcp  # noqa: PLC0415 - imports sympy, which takes a second

        return dcp.read(inner, wanted.key)
    if state_dicts.is_hf(inner):
        _refuse_without_effect(wanted, "Hugging Face", {"tag", "inert"})
        return state_dicts.read_hf(inner, wanted.inert)
    raise ConfigError(
        f'[convert] "{inner}" is not a checkpoint of a known format; allowed: Penstock, DeepSpeed '
        f"(latest, *_model_states.pt, zero/), torch.distributed.checkpoint (.metadata) and Hugging "
        f"Face (model.safetensors, pytorch_model.bin, or an index of them)"
    )


def parse_dtype(text: str) -> Any:
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if text not in named:
        raise ConfigError(f'[convert] dtype is "{text}"; allowed: {", ".join(named)}')
    return named[text]
