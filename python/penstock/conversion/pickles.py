"""Reads pickles of other libraries without running code from them.

The reader is torch's weights-only unpickler. A class that it does not know is replaced by an inert
class if its name is on a list; any other unknown class is an error.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from penstock._native import ConfigError, RuntimeFault

# Classes in DeepSpeed's checkpoints that are neither tensors nor plain values.
_KNOWN = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class Inert:
    """Replaces an object of a class that is not imported; its attributes are plain values."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def load(path: str | os.PathLike[str], inert: Sequence[str] = ()) -> Any:
    """Reads a file of torch.save(). Tensor values stay in the file until they are used.

    Args:
        inert: full names of more classes that are allowed; their objects become `Inert`.

    Raises:
        ConfigError: the file has an object of another class, which the error names.
        RuntimeFault: the file was not written by torch.save(), or is damaged.
    """
    allowed: list[Any] = [
        (type(name.rpartition(".")[2], (Inert,), {}), name) for name in (*_KNOWN, *inert)
    ]
    allowed += _numpy_scalars()
    zipped = _is_zip(path)
    if zipped:
        _check_members(path)
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except pickle.UnpicklingError as error:
        name = _name_in(str(error))
        if name:
            raise ConfigError(
                f'[convert::load] "{os.fspath(path)}" has an object of class {name}, which is '
                f"neither a tensor nor a plain value{_advice(name, str(error))}"
            ) from error
        raise RuntimeFault(
            f'[convert::load] "{os.fspath(path)}" was not written by torch.save(), or has objects '
            f"other than tensors and plain values"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, KeyError, IndexError) as error:
        raise RuntimeFault(
            f'[convert::load] cannot read "{os.fspath(path)}": {str(error) or "it is too short"}'
        ) from error


def _numpy_scalars() -> list[Any]:
    """Returns what a numpy scalar ("best_acc") needs, under both names of numpy's module."""
    inner = "numpy._core" if numpy.__version__ >= "2" else "numpy.core"
    multiarray = importlib.import_module(f"{inner}.multiarray")
    kinds = {type(numpy.dtype(name)) for name in ("f8", "f4", "f2", "i8", "i4", "u1", "?")}
    return [
        numpy.dtype,
        *kinds,
        (multiarray.scalar, "numpy.core.multiarray.scalar"),
        (multiarray.scalar, "numpy._core.multiarray.scalar"),
    ]


def _check_members(path: str | os.PathLike[str]) -> None:
    """Verifies the CRC-32 of each member of the zip archive, because torch's reader does not.

    Raises RuntimeFault if a CRC-32 does not match, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:
        raise RuntimeFault(f'[convert::load] cannot read "{os.fspath(path)}": {error!r}') from error
    if damaged is not None:
        raise RuntimeFault(
            f'[convert::load] cannot read "{os.fspath(path)}": the CRC-32 of "{damaged}" does not '
            f"match. If it was saved with torch.serialization.set_crc32_options(False), save it "
            f"again without this call"
        )


def _is_zip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _advice(name: str, error: str) -> str:
    if "is blocked" in error:  # system functions: no checkpoint needs them
        return ""
    return (
        f". If you do not need its contents, add --inert {name}: the class is neither imported nor "
        f"run"
    )


def _name_in(error: str) -> str:
    """Returns the name of the class that torch's reader did not allow; "" if unknown."""
    for begin in ("GLOBAL ", "Unsupported class ", "Unsupported global: GLOBAL "):
        _, found, rest = error.partition(begin)
        if found:
            return rest.split()[0].rstrip(".,")
    return ""


# ---- the metadata of torch.distributed.checkpoint

METADATA = ".metadata"  # a folder with it is such a checkpoint


class Record:
    """Holds the contents of an object of the metadata: by name, or in order in `args`."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = (state,)


_RECORDS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)


def _foreign(module: str, name: str) -> ConfigError:
    return ConfigError(
        f"[convert::load] the metadata has a {module}.{name}, which is not a class of "
        f"torch.distributed.checkpoint"
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata's own classes as records. Apart from these, allows only sizes, dtypes and
    dicts.

    The record classes belong to one unpickler, so a pickle that changes a class has no effect
    outside that unpickler.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in _RECORDS:
            return self._classes.setdefault(name, type(name, (Record,), {}))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise _foreign(module, name)

    def _member(self, owner: Any, name: str) -> Any:
        """Returns a member of an enum, which some versions of Python 3.11 pickle by getattr()."""
        enum = self._classes.get("_MEM_FORMAT_ENCODING")
        if enum is None or owner is not enum:
            raise _foreign("builtins", "getattr")
        return enum(name)


def load_metadata(path: pathlib.Path) -> Any:
    """Reads the file `.metadata` of torch.distributed.checkpoint as records.

    Raises:
        ConfigError: the file has an object of another class, which the error names.
        RuntimeFault: the file is of a different kind, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except ConfigError:
        raise
    except Exception as error:
        raise RuntimeFault(f'[convert::load] cannot read "{path}": {error}') from error
