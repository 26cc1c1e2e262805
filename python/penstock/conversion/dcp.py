"""Folders of torch.distributed.checkpoint, in and out, on one process."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import pickles, state_dicts
from penstock.conversion.foreign import Entry, Foreign

_METADATA = ".metadata"


def is_one(folder: pathlib.Path) -> bool:
    return (folder / _METADATA).is_file()


# ---- in


class _Reader(FileSystemReader):
    """Reads the metadata once, without running code from it."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self._metadata = pickles.load_metadata(folder / _METADATA)
        for info in self._metadata.storage_data.values():
            parts = pathlib.PurePosixPath(info.relative_path).parts
            if pathlib.PurePosixPath(info.relative_path).is_absolute() or ".." in parts:
                raise RuntimeFault(f'[convert::dcp] "{folder}" names "{info.relative_path}"')

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Values that are no tensors are plain ones."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(folder: pathlib.Path, key: str) -> Foreign:
    """What `save()` wrote there of a model, and of an optimizer by parameters' names.

    Raises:
        ConfigError: it is not clear which tensors are the weights; objects that are no values.
        RuntimeFault: a file is missing or damaged.
    """
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    paths = metadata.planner_data or {}
    values: dict[state_dicts.Path, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if isinstance(stored, TensorStorageMetadata):
            shape, dtype = tuple(stored.size), stored.properties.dtype
            values[path] = Entry("", name, shape, dtype, _values(reader, name, shape, dtype))
        else:
            values[path] = _load(reader, name, None)
    found = Foreign("torch.distributed.checkpoint")
    state_dicts.sort_out(found, _scalars(values), key)
    return found


def _load(reader: _Reader, name: str, into: Any) -> Any:
    held = {name: into}
    try:
        load(held, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # which is no Exception
        why = next(iter(error.failures.values()))[0]
        raise RuntimeFault(f'[convert::dcp] cannot read "{name}": {why}') from error
    return held[name]


def _values(
    reader: _Reader, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    def values() -> torch.Tensor:
        read = _load(reader, name, torch.empty(shape, dtype=dtype))
        if not isinstance(read, torch.Tensor):
            raise RuntimeFault(f'[convert::dcp] "{name}" is no tensor')
        return read

    return values


def _scalars(values: dict[state_dicts.Path, Any]) -> dict[state_dicts.Path, Any]:
    """Tensors of one element, as steps are, by their value."""
    return {
        path: one.read() if isinstance(one, Entry) and one.shape == () else one
        for path, one in values.items()
    }


# ---- out


class _Lazy(DefaultSavePlanner):
    """Takes tensors as they are wanted; the plan is made of their shapes."""

    def __init__(self, values: dict[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self._values = values

    def lookup_object(self, index: Any) -> Any:
        take = self._values.get(index.fqn)
        return take() if take is not None else super().lookup_object(index)


def write(
    folder: pathlib.Path,
    weights: dict[str, Entry],
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """As FSDP users save: {"model": {...}, "optim": {"state": {...}, "param_groups": [...]}}.

    Args:
        state: by parameter, what the optimizer keeps: entries and numbers.
        groups: options and "params", names.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f'[convert::dcp] "{folder}" is not empty')
    optim = {"state": state, "param_groups": groups}
    tree = {"model": weights, **({"optim": optim} if state or groups else {})}
    values: dict[str, Callable[[], torch.Tensor]] = {}

    def planned(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Entry):
            values[".".join(path)] = value.read
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, dict):
            return {key: planned(one, (*path, str(key))) for key, one in value.items()}
        return value

    save(
        planned(tree, ()),
        storage_writer=FileSystemWriter(folder, thread_count=1),
        planner=_Lazy(values),
        no_dist=True,
    )
