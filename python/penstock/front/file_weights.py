"""Values of a model from safetensors files. Each rank reads only parts of the files."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import module_tree, ranks, shard_index

_MOST = 10  # names in one line of an error
# Files of torch 0.4 and before lack these entries, and torch's norms load without them.
_COUNTS = "num_batches_tracked"
_TIED = (
    ". If it is tied to a parameter in the files, call model.tie_weights() before the end of "
    "penstock.init(), after accelerate's init_empty_weights(), which separates tied parameters"
)
_LOADS = ("load_state_dict", "_load_from_state_dict")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


@dataclasses.dataclass
class _Tensor:
    file: Any  # an open _penstock.WeightsFile
    head: Any  # name, shape, dtype and place of the values

    def values(self) -> torch.Tensor:
        read: torch.Tensor = self.file.read(
            list(self.head.shape), self.head.dtype, self.head.offset
        )
        return read


class FileWeights:
    """The tensors of a safetensors file or of a folder of Hugging Face's libraries, by name. The
    files stay open.

    Args:
        path: a file `*.safetensors`, or a folder with `model.safetensors` or
            `model.safetensors.index.json`.

    Raises:
        ConfigError: if there are no such files.
        RuntimeFault: if a file is damaged, or the index does not match the files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        files, named = _files(self.path)
        self.tensors: dict[str, _Tensor] = {}
        self._files = [_penstock.WeightsFile(str(file)) for file in files]
        for file, opened in zip(files, self._files, strict=True):
            for head in _penstock.read_safetensors_head(str(file)):
                if head.name in self.tensors:
                    raise RuntimeFault(
                        f'[front::init] "{self.path}": two files have the tensor "{head.name}"'
                    )
                self.tensors[head.name] = _Tensor(opened, head)
        if named is not None and set(named) != set(self.tensors):
            raise RuntimeFault(
                f'[front::init] "{self.path}": the tensor names in the index and in the files '
                f"differ, for example {_some(set(named) ^ set(self.tensors))}"
            )

    def print(self) -> str:
        """Returns a text for comparisons between ranks. It differs if the files differ in size or
        in samples of their contents."""
        return " ".join(str(file.print()) for file in self._files)


def _files(path: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str] | None]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path], None
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"], None
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return shard_index.files_of(index, "front::init")
    why = "does not exist"
    if path.exists():
        why = "has neither model.safetensors nor model.safetensors.index.json"
        why = why if path.is_dir() else "is not a *.safetensors file"
    raise ConfigError(
        f'[front::init] weights is "{path}", which {why}. Pass a safetensors file or a folder with '
        f"one; `penstock convert --to safetensors` makes one from other formats"
    )


def opened(path: str | os.PathLike[str], held: Any) -> FileWeights:
    """[all ranks] Opens the files, the same on every rank.

    Raises ConfigError or RuntimeFault on every rank if a rank cannot open them or has other files.
    """
    error, found, told = None, None, ""
    try:
        found = FileWeights(path)
        told = f"has {found.print()}"
    except (ConfigError, RuntimeFault) as problem:
        error, told = problem, f"failed with: {problem}"
    texts: list[str] = held.share(told)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if not text.startswith("has "):
            raise RuntimeFault(f"[front::init] rank {rank} {text}")
        if text != texts[0]:
            raise RuntimeFault(
                f'[front::init] the files in "{path}" of rank 0 and of rank {rank} are different. '
                f"Copy the same files to each machine"
            )
    assert found is not None
    return found


class Seen:
    """What a context with files has seen: modules, and parameters that were written to after their
    module was built."""

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._written: set[int] = set()  # storages

    def registered(self, parent: torch.nn.Module, _name: str, value: Any) -> None:
        self.modules.update(one for one in (parent, value) if isinstance(one, torch.nn.Module))

    def wrote(self, tensor: torch.Tensor) -> None:
        if not _in_constructor():
            self._written.add(tensor.untyped_storage()._cdata)

    def warn_of_writes(self, model: torch.nn.Module, path: Any) -> None:
        names = [
            f'"{name}"'
            for name, param in module_tree.params_of(model)
            if not param.is_meta and param.untyped_storage()._cdata in self._written
        ]
        if names and ranks.rank() == 0:
            warnings.warn(
                f"[front::init] {len(names)} parameters were written to after they were built (for "
                f'example {", ".join(names[:3])}), and the values of "{path}" now replace what '
                f"was written. To change loaded values, write to them in a later "
                f"`with penstock.init():`",
                RuntimeWarning,
                stacklevel=5,
            )


def root_of(seen: Iterable[torch.nn.Module], path: pathlib.Path) -> torch.nn.Module:
    """Returns the module that contains all others in `seen`.

    Raises ConfigError unless exactly one such module has parameters or persistent buffers.
    """
    modules = list(seen)
    inner = {id(child) for one in modules for child in one._modules.values() if child is not None}
    roots = [one for one in modules if id(one) not in inner and any(_names(one))]
    if len(roots) == 1:
        return roots[0]
    built = " and ".join(f"a {type(one).__name__}" for one in roots) or "no model"
    raise ConfigError(
        f'[front::init] penstock.init(weights="{path}") gives the values of the files to one '
        f"model, but {built} was built inside it. Build each model in a context of its own"
    )


def _names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and persistent buffers under every name, in the order of state_dict()."""
    for path, module in module_tree.modules_of(model, repeats=True):
        own = {name: param for name, param in module._parameters.items() if param is not None}
        for name, value in itertools.chain(own.items(), module_tree.saved_buffers(module)):
            yield f"{path}.{name}" if path else name, value


class Filling:
    """Gives the values of files to one model, as `load_state_dict()` would.

    If a parameter covers its whole storage, each rank later reads the values that it keeps. All
    other parameters and buffers are read now.

    Args:
        weights: the files.
        held: the store of parameters built under `penstock.init()`.
        strict: whether every name must be both in the model and in the files.
    """

    def __init__(self, weights: FileWeights, held: Any, strict: bool) -> None:
        self._weights, self._held, self._strict = weights, held, strict
        self._ties = False  # whether the model has transformers' tie_weights()

    def fill(self, model: torch.nn.Module, place: tuple[str, torch.device], ops: Any) -> None:
        """[all ranks] Fills the model. `place`: where parameters wait and train. `ops`: makes the
        mode in which parameters without memory have values.

        Raises:
            ConfigError: if tensors are missing, unexpected or do not fit; the error names them.
        """
        _check_plain(model, self._weights.path)
        self._ties = callable(getattr(model, "tie_weights", None))
        names: dict[torch.Tensor, list[str]] = {}
        for name, value in _names(model):
            names.setdefault(value, []).append(name)
        there = self._weights.tensors
        # If a tied tensor has several names, the last one in the file counts, as in torch.
        chosen = {
            value: [there[name] for name in its if name in there][-1:]
            for value, its in names.items()
        }
        self._check(names, chosen)
        with torch.no_grad():
            for value, found in chosen.items():
                if found:
                    self._give(value, found[0], place, ops)
        _replace_meta_buffers(model, {value: found[0] for value, found in chosen.items() if found})

    def _give(
        self, value: torch.Tensor, found: _Tensor, place: tuple[str, torch.device], ops: Any
    ) -> None:
        hollow = self._held.holds(value)
        late = isinstance(value, torch.nn.Parameter) and (value.is_meta or _fills(value, hollow))
        if late:
            head = found.head
            self._held.read_from(value, found.file, head.dtype, head.offset, *place)
        elif not value.is_meta:
            with ops() if hollow else contextlib.nullcontext():
                value.data.copy_(found.values())

    def _check(
        self,
        names: Mapping[torch.Tensor, list[str]],
        chosen: Mapping[torch.Tensor, list[_Tensor]],
    ) -> None:
        path, known = self._weights.path, {name for its in names.values() for name in its}
        missing = [
            names[value][0]
            for value, found in chosen.items()
            if not found and not names[value][0].endswith(_COUNTS)
        ]
        empty = [names[value][0] for value, found in chosen.items() if not found and value.is_meta]
        unexpected = [name for name in self._weights.tensors if name not in known]
        wrong = [
            text
            for value, found in chosen.items()
            for one in found
            if (text := _misfit(one, value))
        ]
        parts = [f"tensors that do not fit: {_some(wrong, '')}"] if wrong else []
        if missing and (self._strict or empty):
            parts.append(f"missing in the files: {_some(missing)}")
        if unexpected and self._strict:
            parts.append(f"not in the model: {_some(unexpected)}")
        if parts:
            raise ConfigError(
                f'[front::init] the tensors of "{path}" and of the model differ: '
                + "; ".join(parts)
                + (". strict=False allows missing and additional tensors" if self._strict else "")
                + (". A missing tensor on the meta device has no values" if empty else "")
                + (_TIED if empty and self._ties else "")
            )
        if (missing or unexpected) and ranks.rank() == 0:
            warnings.warn(
                f'[front::init] "{path}": these tensors are missing in the files and keep their '
                f"initial values: {_some(missing) or 'none'}; these are not in the model and are "
                f"not read: {_some(unexpected) or 'none'}",
                RuntimeWarning,
                stacklevel=6,
            )


def _fills(param: torch.Tensor, hollow: bool) -> bool:
    """Whether a parameter without memory covers its whole storage, in the files' element order."""
    size = param.untyped_storage().nbytes() if hollow else -1
    return param.is_contiguous() and param.storage_offset() == 0 and param.nbytes == size


def _check_plain(model: torch.nn.Module, path: pathlib.Path) -> None:
    for _, module in module_tree.modules_of(model):
        calls = [vars(module).get(name) or getattr(type(module), name) for name in _LOADS]
        hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
        calls += [getattr(hook, "hook", hook) for hook in hooks]  # torch wraps some of its hooks
        if any(not str(getattr(one, "__module__", "")).startswith("torch.") for one in calls):
            raise ConfigError(
                f"[front::init] {type(module).__name__} changes how its state_dict is loaded, and "
                f'weights="{path}" does not call that code. Load inside `with penstock.init():` '
                f"with load_state_dict() or from_pretrained() instead"
            )


def _misfit(found: _Tensor, value: torch.Tensor) -> str:
    """Returns why a tensor of a file cannot be copied to `value`, or ""."""
    head, shape = found.head, tuple(found.head.shape)
    if shape != tuple(value.shape):
        return f'"{head.name}" has shape {shape} in the file and {tuple(value.shape)} in the model'
    if _kind(head.dtype) != _kind(value.dtype):
        return f'"{head.name}" has dtype {head.dtype} in the file and {value.dtype} in the model'
    return ""


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype == torch.bool:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "integer"


def _replace_meta_buffers(model: torch.nn.Module, found: Mapping[torch.Tensor, _Tensor]) -> None:
    made: dict[torch.Tensor, torch.Tensor] = {}
    for _, module in module_tree.modules_of(model):
        for name, value in module_tree.saved_buffers(module):
            if value.is_meta and value in found:
                if value not in made:
                    made[value] = found[value].values().to(value.dtype)
                module._buffers[name] = made[value]


def _some(names: Iterable[str], quote: str = '"') -> str:
    listed = sorted(names)
    shown = ", ".join(f"{quote}{name}{quote}" for name in listed[:_MOST])
    return shown + (f" and {len(listed) - _MOST} more" if len(listed) > _MOST else "")


def _in_constructor() -> bool:
    """Whether the caller runs inside `__init__` of a module, which initialises values."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames:
            if isinstance(frame.f_locals.get(code.co_varnames[0]), torch.nn.Module):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
