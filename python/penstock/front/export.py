"""Writes weights in the form that Hugging Face's libraries load: safetensors and an index."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import IO, Any

import torch

from penstock._native import Bug, ConfigError
from penstock.front.model_state import OwnState

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_OTHERS = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PART = ".part"  # suffix of a file that is being written


class _File:
    """One safetensors file. Its tensors are written in any order, in slices."""

    def __init__(self, path: pathlib.Path, entries: list[tuple[str, torch.dtype, list[int]]]):
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.places: dict[str, int] = {}
        end = 0
        for name, dtype, shape in entries:
            size = dtype.itemsize
            for length in shape:
                size *= length
            kind = (_NAMES | _OTHERS)[dtype]
            head[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
            self.places[name] = end
            end += size
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.bytes, self._written = path, end, 0
        self._data = 8 + len(text)
        self._file: IO[bytes] = open(f"{path}{_PART}", "wb")  # noqa: SIM115 - closed by finish()
        try:
            self._file.truncate(self._data + end)
            self._file.write(len(text).to_bytes(8, "little") + text)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        self._file.seek(self._data + self.places[name] + begin * values.element_size())
        self._file.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
        self._written += values.nbytes

    def sync(self) -> None:
        """Flushes and closes the file. Raises Bug unless all bytes of the header's total exist."""
        if self._written != self.bytes:
            raise Bug(
                f"[front::export_hf] {self.path}: {self._written} of {self.bytes} bytes were "
                f"written"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        pathlib.Path(f"{self.path}{_PART}").unlink(missing_ok=True)


class _Files:
    """The files of one export. Finds the file of a tensor by the tensor's name."""

    def __init__(
        self,
        folder: pathlib.Path,
        entries: list[tuple[str, torch.dtype, list[int]]],
        most: int,
    ):
        groups: list[list[tuple[str, torch.dtype, list[int]]]] = [[]]
        room = most
        for entry in entries:
            size = entry[1].itemsize * int(torch.Size(entry[2]).numel())
            if size > room and groups[-1]:
                groups.append([])
                room = most
            groups[-1].append(entry)
            room -= size
        self._folder = folder
        self._files: list[_File] = []
        self._of: dict[str, _File] = {}
        for i, group in enumerate(groups):
            name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            try:
                file = _File(folder / (name if len(groups) > 1 else "model.safetensors"), group)
            except OSError:
                self.abandon()
                raise
            self._files.append(file)
            self._of.update(dict.fromkeys((entry[0] for entry in group), file))

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        self._of[name].write(name, begin, values)

    def finish(self) -> None:
        """Renames every file to its final name, the index last. Deletes an earlier export."""
        for file in self._files:
            file.sync()
        stale = {path for path in self._folder.iterdir() if _OURS.fullmatch(path.name)}
        for path in stale - {file.path for file in self._files}:
            path.unlink()  # a loader would prefer it to the new files
        for file in self._files:
            os.replace(f"{file.path}{_PART}", file.path)
        if len(self._files) > 1:
            index = self._folder / "model.safetensors.index.json"
            names = {name: file.path.name for name, file in self._of.items()}
            total = sum(file.bytes for file in self._files)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
            pathlib.Path(f"{index}{_PART}").write_text(text + "\n", encoding="utf-8")
            os.replace(f"{index}{_PART}", index)

    def abandon(self) -> None:
        for file in self._files:
            file.abandon()


@contextlib.contextmanager
def files(
    folder: pathlib.Path, entries: list[tuple[str, torch.dtype, list[int]]], max_shard_bytes: int
) -> Iterator[_Files]:
    """Opens files for tensors (name, dtype, shape). The block writes the tensors in any order.

    The files get their final names when the block ends without an error, and are deleted otherwise.
    """
    made = _Files(folder, entries, max_shard_bytes)
    try:
        yield made
        made.finish()
    except BaseException:
        made.abandon()
        raise


def export_hf(
    engine: Any,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """See `Checkpointing.export_hf`."""
    OwnState(engine).check_names()
    params = engine._structure.own
    made = {name: dtype or param.dtype for param, name in params.items()}
    if dtype is not None and dtype not in _NAMES:
        raise ConfigError(
            f"[front::export_hf] dtype is {dtype}. Pass a floating dtype, such as torch.float32"
        )
    if max_shard_bytes < 1:
        raise ConfigError(
            f"[front::export_hf] max_shard_bytes is {max_shard_bytes}. Allowed: 1 or more"
        )
    if not engine._ranks.on_first_node():
        return
    engine._pipeline.bring_buffers()
    buffers = dict(engine._persistent_buffers())
    whole = dict(engine._core.values.shapes())
    entries = [
        (name, made[name], whole.get(name, list(param.shape))) for param, name in params.items()
    ]
    entries += [(name, value.dtype, list(value.shape)) for name, value in buffers.items()]
    files: list[_Files] = []

    def take(name: str, begin: int, values: torch.Tensor) -> None:
        if not files:
            folder = pathlib.Path(path)
            folder.mkdir(parents=True, exist_ok=True)
            files.append(_Files(folder, entries, max_shard_bytes))
        if name:
            return files[0].write(name, begin, values.to(made[name]))
        for name, value in buffers.items():  # noqa: PLR1704 - the last call has no name
            files[0].write(name, 0, value.detach())
        files[0].finish()
        floats = [one for one in made.values() if one.is_floating_point]
        return _save_configs(engine.module, os.fspath(path), floats[:1])

    try:
        engine._core.values.stream(take)
    except BaseException:
        for one in files:
            one.abandon()
        raise


def _save_configs(model: torch.nn.Module, path: str, dtype: list[torch.dtype]) -> None:
    """Writes config.json and generation_config.json, if the model is a transformers model.

    As `save_pretrained()` does, config.json names the model's class, which servers and converters
    look for, and the dtype of the weights. The model's own config keeps its values.
    """
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if not callable(getattr(config, "save_pretrained", None)):
            continue
        if name == "config" and hasattr(type(model), "config_class"):
            config = copy.deepcopy(config)
            config.architectures = [type(model).__name__]
            if dtype and hasattr(config, "dtype"):
                config.dtype = str(dtype[0]).removeprefix("torch.")
        config.save_pretrained(path)
