"""Pickles of others, read without running code from them.

torch's own weights-only reader does the work. What it does not know stands in for by an inert
class of that name, if the name is on a list; any other name is an error.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from penstock._native import ConfigError, RuntimeFault

# What DeepSpeed's checkpoints hold beside tensors and plain values.
_KNOWN = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class Inert:
    """Stands for an object of a class that is not looked for; its attributes are plain values."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def load(path: str | os.PathLike[str], inert: Sequence[str] = ()) -> Any:
    """What torch.save() wrote; the tensors' values stay in the file until they are read.

    Args:
        inert: full names of more classes whose objects may be in it, and become `Inert`.

    Raises:
        ConfigError: it holds something else (names it).
        RuntimeFault: it is no such file, or is damaged.
    """
    allowed: list[Any] = [
        (type(name.rpartition(".")[2], (Inert,), {}), name) for name in (*_KNOWN, *inert)
    ]
    allowed += _numpy_scalars()
    zipped = _is_zip(path)
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except pickle.UnpicklingError as error:
        name = _name_in(str(error))
        if name:
            raise ConfigError(
                f'[convert::load] "{os.fspath(path)}" holds an object of {name}, which is neither '
                f"a tensor nor a plain value{_advice(name, str(error))}"
            ) from error
        raise RuntimeFault(
            f'[convert::load] "{os.fspath(path)}" is no file of torch.save(), or holds more than '
            f"tensors and plain values"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, KeyError, IndexError) as error:
        raise RuntimeFault(
            f'[convert::load] cannot read "{os.fspath(path)}": {str(error) or "it ends too soon"}'
        ) from error


def _numpy_scalars() -> list[Any]:
    """A number of numpy among others ("best_acc"), under both names of its module."""
    inner = "numpy._core" if numpy.__version__ >= "2" else "numpy.core"
    multiarray = importlib.import_module(f"{inner}.multiarray")
    kinds = {type(numpy.dtype(name)) for name in ("f8", "f4", "f2", "i8", "i4", "u1", "?")}
    return [
        numpy.dtype,
        *kinds,
        (multiarray.scalar, "numpy.core.multiarray.scalar"),
        (multiarray.scalar, "numpy._core.multiarray.scalar"),
    ]


def _is_zip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _advice(name: str, error: str) -> str:
    if "is blocked" in error:  # no checkpoint needs a function of the system
        return ""
    return (
        f". If what it says is not needed, name it with --inert {name}: nothing of that name is "
        f"run or imported"
    )


def _name_in(error: str) -> str:
    """The class that torch's reader did not allow."""
    for begin in ("GLOBAL ", "Unsupported class ", "Unsupported global: GLOBAL "):
        _, found, rest = error.partition(begin)
        if found:
            return rest.split()[0].rstrip(".,")
    return ""


# ---- the metadata of torch.distributed.checkpoint


class Record:
    """Stands for one of its objects: what that holds, by name or in order."""

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


class _MetadataUnpickler(pickle.Unpickler):
    """Its own classes, sizes and dtypes. What a pickle sets on a class it sets on one of ours that
    is thrown away."""

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
        raise ConfigError(
            f"[convert::load] the metadata holds a {module}.{name}, which is none of "
            f"torch.distributed.checkpoint's"
        )


def load_metadata(path: pathlib.Path) -> Any:
    """The file `.metadata` of torch.distributed.checkpoint, as records.

    Raises:
        ConfigError: it holds something else (names it).
        RuntimeFault: it is no such file, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except ConfigError:
        raise
    except Exception as error:
        raise RuntimeFault(f'[convert::load] cannot read "{path}": {error}') from error
