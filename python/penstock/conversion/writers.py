"""Writes a Penstock checkpoint (from a `Foreign`), or writes files for other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.conversion.foreign import MOMENTS, OWN, Entry, Foreign
from penstock.conversion.options import Options, Say
from penstock.front import export
from penstock.front.json_values import decode, decode_scalar

_SHARD_BYTES = 5_000_000_000
_EVERY_S = 2.0


class _Progress:
    """Reports the progress every _EVERY_S seconds."""

    def __init__(self, entries: list[Entry], say: Say) -> None:
        self._whole = sum(_size(one) for one in entries)
        self._done, self._said = 0, time.monotonic()
        self._say = say

    def add(self, entry: Entry) -> None:
        self._done += _size(entry)
        if time.monotonic() - self._said >= _EVERY_S:
            self._said = time.monotonic()
            self._say(f"{self._done / 2**30:.2f} of {self._whole / 2**30:.2f} GiB")


def _size(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def _values(entry: Entry) -> torch.Tensor:
    values = entry.read()
    if tuple(values.shape) != entry.shape or values.dtype != entry.dtype:
        raise RuntimeFault(
            f'[convert] "{entry.name}" ({entry.role}) has shape {tuple(values.shape)} and '
            f"{values.dtype}, but its file records {entry.shape} and {entry.dtype}"
        )
    return values.contiguous()


# ---- Penstock checkpoints


def write_ours(found: Foreign, root: pathlib.Path, source: str, say: Say) -> str:
    """Writes a checkpoint "step-N" in `root` and returns its path.

    Raises ConfigError if there are no tensors or "step-N" exists.
    """
    if not found.entries:
        raise ConfigError(f'[convert] "{source}" has no tensors')
    tag = f"step-{found.steps}"
    if (root / tag).exists():
        raise ConfigError(f'[convert] "{root / tag}" already exists: choose another folder')
    if root.is_dir() and any(root.iterdir()):
        say(f'"{root}" is not empty: its "latest" will name {tag}')
    by_name = {(one.role, one.name): i for i, one in enumerate(found.entries)}
    tensors = [
        _penstock.StoredTensor(
            one.role,
            one.name,
            list(one.shape),
            one.dtype,
            by_name[one.role, one.same_as] if one.same_as else -1,
        )
        for one in found.entries
    ]
    front = _front(found, say)
    about = {
        "penstock": importlib.metadata.version("penstock"),
        "torch": torch.__version__,
        "strategy": "none",
        "converted": found.kind,
        "source": source,
    }
    state = {
        "steps": found.steps,
        "skipped": found.skipped,
        "loss_scale": found.loss_scale or {"active": False, "value": 1.0, "good_steps": 0},
        "updates": found.updates,
    }
    stored = _penstock.StoredState()
    stored.about, stored.state = json.dumps(about), json.dumps(state)
    stored.front, stored.of_rank = json.dumps(front), json.dumps({"own": found.own})
    writer = _penstock.CheckpointWriter(str(root), tag, tensors, stored)
    try:
        progress = _Progress(found.entries, say)
        for i, entry in enumerate(found.entries):
            if not entry.same_as:
                writer.write(i, _values(entry))
                progress.add(entry)
        return str(writer.commit())
    finally:
        del writer  # deletes an unfinished draft, even if an error keeps this frame alive


def _front(found: Foreign, say: Say) -> dict[str, Any]:
    client = Foreign(found.kind)
    front: dict[str, Any] = {
        "converted": found.kind,
        "client_state": {
            key: client.take(f'"{key}"', value) for key, value in found.client_state.items()
        }
        or None,
        "tied": found.tied,
    }
    for note in client.notes:
        say(note)
    if found.groups is not None:
        front["optimizer"] = {"class": None, "groups": found.groups, "peak_lrs": None}
    if found.scheduler is not None:
        front["scheduler"] = {"class": None, "state": found.scheduler}
    return front


# ---- files of other libraries


@dataclasses.dataclass
class Held:
    """The contents to write: weights, and optimizer state by parameter."""

    weights: list[Entry]
    tied: dict[str, str]
    moments: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def of_foreign(found: Foreign) -> Held:
    moments: dict[str, dict[str, Any]] = defaultdict(dict)
    weights = []
    for one in found.entries:
        if one.role in ("param", "buffer", "weight"):
            weights.append(one)
        else:
            moments[one.name][one.role.removeprefix(OWN)] = one
    for name, kept in found.own.items():
        for key, value in kept.items():
            moments[name][key] = decode_scalar(value)
    return Held(weights, found.tied, dict(moments), found.groups or [])


def of_ours(path: pathlib.Path, tag: str, say: Say) -> Held:
    """Reads a Penstock checkpoint. `tag` "" means the newest in `path`."""
    reader = _penstock.CheckpointReader(str(path), tag)
    say(f"reading {reader.path}")
    front, state = json.loads(reader.front), json.loads(reader.state)
    weights: list[Entry] = []
    moments: dict[str, dict[str, Any]] = defaultdict(dict)
    for i, one in enumerate(reader.tensors):
        shape, read = tuple(one.shape), functools.partial(reader.read, i)
        entry = Entry(one.role, one.name, shape, one.dtype, read)
        if one.role in ("param", "weight") or (one.role == "buffer" and one.rank <= 0):
            weights.append(entry)
        elif one.role in MOMENTS or one.role.startswith(OWN):
            moments[one.name][one.role.removeprefix(OWN)] = entry
    for name, kept in json.loads(reader.of_rank).get("own", {}).items():
        moments[name] |= {key: decode_scalar(value) for key, value in kept.items()}
    for name, count in state["updates"].items():
        if name in moments:
            moments[name].setdefault("step", torch.tensor(float(count)))
    groups = front.get("optimizer", {}).get("groups", [])
    return Held(weights, front.get("tied", {}), dict(moments), groups)


def write_others(held: Held, out: pathlib.Path, how: Options) -> str:
    """Writes the weights as safetensors, a torch state dict, or DCP (with the optimizer's state).

    Returns the path that was written.
    """
    how.say(
        "step counts, the loss scale, the scheduler, client_state and generators are left out"
        if how.to == "dcp"
        else "only the weights are written"
    )
    if how.to == "safetensors":
        _write_safetensors(out, held.weights, how)
        return str(out)
    by_name = {one.name: one for one in held.weights}
    tied = {other: name for other, name in held.tied.items() if name in by_name}
    if how.to == "dcp":
        from penstock.conversion import dcp  # noqa: PLC0415 - imports sympy, which takes a second

        options = [{**decode(one["options"]), "params": one["params"]} for one in held.groups]
        weights = by_name | {other: by_name[name] for other, name in tied.items()}
        dcp.write(out, weights, held.moments, options)
        return str(out)
    made = whole(held, dtype=how.dtype)
    with _replaced(out) as draft:
        torch.save(made, draft)
    return str(out)


def whole(
    held: Held, trained_only: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Returns weights and buffers by name. Tied weights appear under all their names."""
    trained = {name for group in held.groups for name in group["params"]}
    chosen = {
        one.name: _cast(_values(one), dtype)
        for one in held.weights
        if not trained_only or one.role == "buffer" or one.name in trained
    }
    return chosen | {other: chosen[name] for other, name in held.tied.items() if name in chosen}


def _cast(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return values.to(dtype) if dtype is not None and values.is_floating_point() else values


def _write_safetensors(out: pathlib.Path, weights: list[Entry], how: Options) -> None:
    dtype = how.dtype
    made = {
        one.name: dtype if dtype is not None and one.dtype.is_floating_point else one.dtype
        for one in weights
    }
    once = [one for one in weights if not one.same_as]
    out.mkdir(parents=True, exist_ok=True)
    progress = _Progress(once, how.say)
    with export.files(
        out, [(one.name, made[one.name], list(one.shape)) for one in once], _SHARD_BYTES
    ) as files:
        for one in once:
            files.write(one.name, 0, _values(one).to(made[one.name]))
            progress.add(one)


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a draft path and renames it to `path` at the end, so `path` is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
