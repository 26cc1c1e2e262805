"""Reads state dicts of torch and Lightning, and folders of Hugging Face."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.conversion import pickles
from penstock.conversion.foreign import Entry, Foreign
from penstock.front import shard_index

Path = tuple[Any, ...]
_MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "app.model", "weights")
_SCHEDULERS = ("scheduler", "lr_scheduler", "schedule")
# The names of weight files, in the order in which transformers tries them.
_HF = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
)


# ---- files


def read_file(path: pathlib.Path, inert: Sequence[str], key: str) -> Foreign:
    """Reads a file of torch.save() or safetensors.

    Args:
        inert: full names of more classes that the pickle may have (see pickles.load).
        key: the key of the weights, with dots between levels; "" to detect it.

    Raises:
        ConfigError: the file holds no state dict, or it is not clear which tensors are the weights.
        RuntimeFault: the file is damaged.
    """
    if path.suffix == ".safetensors":
        found = Foreign("safetensors")
        _add_safetensors(found, path)
        return found
    held = pickles.load(path, inert)
    if not isinstance(held, Mapping):
        raise ConfigError(
            f'[convert::torch] "{path}" holds a {type(held).__name__}, not a state dict'
        )
    found = Foreign("torch")
    sort_out(found, dict(leaves(held)), key)
    _share(found)
    return found


def is_hf(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in _HF)


def read_hf(folder: pathlib.Path, inert: Sequence[str]) -> Foreign:
    """Reads the weights that from_pretrained() loads: one file, or shards with an index.

    Raises RuntimeFault if a file is missing or damaged, or the index does not match the files.
    """
    found = Foreign("Hugging Face")
    index = next(folder / name for name in _HF if (folder / name).is_file())
    named: dict[str, str] | None = None
    if index.suffix != ".json":
        files = [index]
    else:
        files, named = shard_index.files_of(index, "convert::hf")
    for file in files:
        if file.suffix == ".safetensors":
            _add_safetensors(found, file)
        else:
            one = read_file(file, inert, "")
            found.entries += one.entries
    there = [entry.name for entry in found.entries]
    if len(set(there)) != len(there) or (named is not None and set(named) != set(there)):
        raise RuntimeFault(
            f'[convert::hf] "{folder}": the tensor names in the index and in the files differ'
        )
    return found


def _add_safetensors(found: Foreign, path: pathlib.Path) -> None:
    for head in _penstock.read_safetensors_head(str(path)):

        def values(head: Any = head) -> torch.Tensor:
            size = torch.Size(head.shape).numel() * head.dtype.itemsize
            with open(path, "rb") as file:
                file.seek(head.offset)
                read = bytearray(size)
                if file.readinto(read) != size:
                    raise RuntimeFault(
                        f'[convert::safetensors] "{path}" ends inside tensor "{head.name}"'
                    )
            if size == 0:
                return torch.zeros(head.shape, dtype=head.dtype)
            return torch.frombuffer(read, dtype=head.dtype).reshape(head.shape)

        found.entries.append(Entry("weight", head.name, tuple(head.shape), head.dtype, values))


# ---- finding weights and optimizers in nested dicts


def leaves(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Returns the values of nested dicts by path. Lists and a scheduler's dict are not split."""
    scheduler = len(path) == 1 and path[0] in _SCHEDULERS
    if isinstance(tree, Mapping) and tree and not scheduler:
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    return [(path, tree)]


def sort_out(found: Foreign, values: dict[Path, Any], key: str) -> None:
    """Adds the weights, the optimizer's state and groups, and other values to `found`.

    Args:
        key: the key of the weights, with dots between levels; "" to detect it.

    Raises:
        ConfigError: it is not clear which tensors are the weights.
    """
    optims = _optimizers(values)
    others = {
        path: value
        for path, value in values.items()
        if path and not any(path[: len(one)] == one for one in optims)
    }
    weights: dict[Path, dict[str, Any]] = defaultdict(dict)
    for path, value in others.items():
        if isinstance(value, (torch.Tensor, Entry)):
            weights[path[:-1]][str(path[-1])] = value
    chosen = _choose(weights, key)
    for name, value in weights.pop(chosen).items():
        _add(found, "weight", name, value)
    for path in weights:
        found.notes.append(f'tensors of "{_text(path)}" are left out: they are not weights')
    _take_rest(found, {p: v for p, v in others.items() if not isinstance(v, (torch.Tensor, Entry))})
    if len(optims) > 1:
        found.notes.append("there are several optimizers: their state is left out")
    for one in optims if len(optims) == 1 else ():
        held = {p[len(one) :]: v for p, v in values.items() if p[: len(one)] == one}
        _take_optimizer(found, held)


def _take_rest(found: Foreign, values: dict[Path, Any]) -> None:
    """Takes the scheduler's state, and top-level values such as "epoch" as client_state."""
    apart = {path: v for path, v in values.items() if path[0] in _SCHEDULERS}
    whole = next((v for path, v in apart.items() if len(path) == 1), None)
    schedule = whole or {str(path[1]): v for path, v in apart.items() if len(path) == 2}
    if schedule:
        found.scheduler = found.take("the scheduler's state", schedule)
    for path, value in values.items():
        if path in apart:
            continue
        if len(path) == 1:
            found.client_state[str(path[0])] = value
        else:
            found.notes.append(f'"{_text(path)}" is left out: it is not a tensor')


def _add(found: Foreign, role: str, name: str, value: Any) -> None:
    if isinstance(value, Entry):
        found.entries.append(Entry(role, name, value.shape, value.dtype, value.read))
    else:
        found.add(role, name, value)


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _optimizers(values: dict[Path, Any]) -> set[Path]:
    """Returns the paths that have both "state" and "param_groups"."""
    found: dict[Path, set[str]] = defaultdict(set)
    for path in values:
        for i, one in enumerate(path):
            kind = str(one).partition(".")[0]
            if i > 0 and kind in ("state", "param_groups"):
                found[path[:i]].add(kind)
    return {path for path, kinds in found.items() if len(kinds) == 2}


def _choose(weights: dict[Path, dict[str, Any]], key: str) -> Path:
    if key:
        chosen = next((path for path in weights if _text(path) == key), None)
    elif len(weights) == 1:
        chosen = next(iter(weights))
    else:
        named = [p for name in _MODEL_KEYS for p in weights if _text(p) == name]
        chosen = named[0] if named else None
    if chosen is None:
        there = ", ".join(f'"{_text(path)}"' for path in weights) or "none"
        raise ConfigError(
            f"[convert::torch] it is not clear which tensors are the weights: choose one of "
            f"{there} with --key"
        )
    return chosen


# ---- an optimizer


def _take_optimizer(found: Foreign, held: dict[Path, Any]) -> None:
    """Takes the state of a torch optimizer, if parameter names are keys or in `param_names`."""
    groups = held.pop(("param_groups",), None) or _groups_of(held)
    if isinstance(groups, list) and groups and all(isinstance(g, dict) for g in groups):
        numbers = [n for group in groups for n in group.get("params", [])]
        names = [n for group in groups for n in group.get("param_names", group.get("params", []))]
        if len(names) != len(numbers) or not all(isinstance(name, str) for name in names):
            found.notes.append(
                "the optimizer's state is left out: its keys are numbers. An optimizer that is "
                "created from model.named_parameters() saves names"
            )
            return
        by = dict(zip(numbers, names, strict=True))
    else:
        groups, by = None, {}
    shapes = {entry.name: entry.shape for entry in found.entries}
    options: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, value in held.items():
        kind, name, key = _optimizer_key(path)
        name = by.get(name, name)
        if kind == "param_groups":
            options[str(name)][key] = value
        elif name not in shapes:
            found.notes.append(
                f'the optimizer\'s state of "{name}" is left out: there is no such weight'
            )
        elif isinstance(value, Entry):
            example = torch.empty(0, dtype=value.dtype)
            found.add_moment(name, key, example, shapes[name], value.read)
        else:
            found.add_moment(name, key, value, shapes[name])
    if groups is not None:
        for group in groups:
            found.add_options(group, [by[n] for n in group["params"]])
    elif options:
        _group(found, options)


def _groups_of(held: dict[Path, Any]) -> list[dict[str, Any]]:
    """Rebuilds a list of groups from paths such as ("param_groups", 0, "lr")."""
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for path in [path for path in held if path[0] == "param_groups" and isinstance(path[1], int)]:
        groups[path[1]][_text(path[2:])] = held.pop(path)
    return [groups[index] for index in sorted(groups)]


def _optimizer_key(path: Path) -> tuple[str, Any, str]:
    """Splits a path into ("state", parameter, key), even if dots join the three."""
    if len(path) >= 3:
        return str(path[0]), path[1], str(path[2])
    kind, _, rest = _text(path).partition(".")
    name, _, key = rest.rpartition(".")
    return kind, name, key


def _group(found: Foreign, options: dict[str, dict[str, Any]]) -> None:
    """Adds groups for options by parameter: parameters with equal options form a group."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, one in options.items():
        same = next((names for other, names in groups if other == one), None)
        if same is None:
            groups.append((one, [name]))
        else:
            same.append(name)
    for one, names in groups:
        found.add_options(one, names)


def _share(found: Foreign) -> None:
    """Marks tied weights, which have several names in a state dict, as sharing their values."""
    first: dict[Any, str] = {}
    for entry in found.entries:
        if entry.role != "weight":
            continue
        value = entry.read()
        place = (
            value.untyped_storage().data_ptr(),
            value.storage_offset(),
            value.stride(),
            entry.shape,
            entry.dtype,
        )
        if value.numel() > 0:
            entry.same_as = first.setdefault(place, entry.name)
            if entry.same_as == entry.name:
                entry.same_as = ""
