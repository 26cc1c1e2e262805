"""Reads and writes folders of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import pickles, state_dicts
from penstock.conversion.foreign import Entry, Foreign

# ---- reading


class _Reader(FileSystemReader):
    """A reader that takes the metadata from `pickles.load_metadata()` and checks them."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        held = pickles.load_metadata(folder / pickles.METADATA)
        try:
            self.paths = {
                str(name): tuple(path) for name, path in (held.planner_data or {}).items()
            }
            self._metadata = Metadata(
                state_dict_metadata={
                    str(name): _stored(str(name), one)
                    for name, one in held.state_dict_metadata.items()
                },
                storage_data={
                    _index(index): _place(one) for index, one in held.storage_data.items()
                },
                storage_meta=StorageMeta(),
            )
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise RuntimeFault(
                f'[convert::dcp] the metadata of "{folder}" is damaged: {error}'
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _sizes(given: Any) -> torch.Size:
    if not all(type(size) is int and size >= 0 for size in given):
        raise ValueError(f"the sizes {given} are not all whole numbers >= 0")
    return torch.Size(given)


def _stored(name: str, one: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(one).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    args = one.properties.args  # positional; an older torch stored the properties by name
    dtype = args[0][0] if args else one.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'"{name}" has no dtype')
    size = _sizes(one.size)
    chunks = [ChunkStorageMetadata(_sizes(c.offsets), _sizes(c.sizes)) for c in one.chunks]
    inside = all(
        len(c.sizes) == len(c.offsets) == len(size)
        and all(at + part <= end for at, part, end in zip(c.offsets, c.sizes, size, strict=True))
        for c in chunks
    )
    whole = sum(c.sizes.numel() for c in chunks) == size.numel()
    if not inside or not whole or len({tuple(c.offsets) for c in chunks}) != len(chunks):
        raise ValueError(f'the parts of "{name}" do not add up to the whole tensor')
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(one: Any) -> MetadataIndex:
    offset = getattr(one, "offset", None)
    index = getattr(one, "index", None)
    return MetadataIndex(str(one.fqn), None if offset is None else _sizes(offset), index)


def _place(one: Any) -> _StorageInfo:
    path = str(one.relative_path)
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f'the file "{path}" is outside the folder')
    return _StorageInfo(path, int(one.offset), int(one.length))


class _Planner(DefaultLoadPlanner):
    """A planner that loads only tensors and plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(folder: pathlib.Path, key: str) -> Foreign:
    """Reads a folder that `save()` wrote: a model, and optimizer state keyed by parameter names.

    Raises:
        ConfigError: it is not clear which tensors are the weights; the folder has objects other
            than tensors and plain values.
        RuntimeFault: a file is missing or damaged.
    """
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    values: dict[state_dicts.Path, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = reader.paths.get(name, (name,))
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
    except CheckpointException as error:  # a BaseException
        why = next(iter(error.failures.values()))[0]
        raise RuntimeFault(f'[convert::dcp] cannot read "{name}": {why}') from error
    return held[name]


def _values(
    reader: _Reader, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    def values() -> torch.Tensor:
        read = _load(reader, name, torch.zeros(shape, dtype=dtype))
        if not isinstance(read, torch.Tensor):
            raise RuntimeFault(f'[convert::dcp] "{name}" is not a tensor')
        return read

    return values


def _scalars(values: dict[state_dicts.Path, Any]) -> dict[state_dicts.Path, Any]:
    """Replaces entries without dims, such as step counts, by their values."""
    return {
        path: one.read() if isinstance(one, Entry) and one.shape == () else one
        for path, one in values.items()
    }


# ---- writing


class _Lazy(DefaultSavePlanner):
    """A planner that plans with shapes only. It reads a tensor just before it writes that
    tensor."""

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
    """Writes the layout that is usual with FSDP.

    This is {"model": {...}, "optim": {"state": {...}, "param_groups": [...]}}.

    Args:
        folder: must be missing or empty.
        state: optimizer state by parameter name: entries and numbers.
        groups: parameter groups: options, and "params" with parameter names.

    Raises:
        ConfigError: the folder is not empty.
        RuntimeFault: the folder cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f'[convert::dcp] "{folder}" is not empty: pass a new or an empty folder')
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

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        save(
            planned(tree, ()),
            storage_writer=FileSystemWriter(draft, thread_count=1),
            planner=_Lazy(values),
            no_dist=True,
        )
        draft.replace(folder)  # replaces an empty folder
    except CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        if isinstance(why, (ConfigError, RuntimeFault, OSError)):
            raise why from error
        raise RuntimeFault(f'[convert::dcp] cannot write "{folder}": {why}') from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
