"""Merges the contents of the model-parallel ranks of one model: stages and parts of weights.

The files of each rank are read into a `Foreign` as if it were the only rank. Then the `Foreign`s of
all ranks are merged.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import cuts
from penstock.conversion.cuts import Cut, Rules
from penstock.conversion.foreign import OWN, Entry, Foreign

_WEIGHTS = ("param", "weight", "buffer")
_TIED = "tied_modules."
_LAYER = re.compile(r"(\d+)\.")


# ---- stages


def of_stages(stages: list[Foreign]) -> Foreign:
    """Merges the layers of all stages.

    Raises:
        RuntimeFault: stages have different values of the same (tied) weight, or different counts.
    """
    whole = stages[0]
    for stage in stages[1:]:
        _check_alike(whole, stage)
        held = {(one.role, one.name): one for one in whole.entries}
        for one in stage.entries:
            other = held.get((one.role, one.name))
            if other is None:
                whole.entries.append(one)
            elif not cuts.equal([other.read(), one.read()]):
                raise RuntimeFault(
                    f'[convert::deepspeed] "{one.name}" ({one.role}) is on several stages of the '
                    f"pipeline, but with different values"
                )
        for name, kept in stage.own.items():
            if whole.own.setdefault(name, kept) != kept:
                raise RuntimeFault(
                    f'[convert::deepspeed] stages have different optimizer values for "{name}"'
                )
        whole.updates |= stage.updates
    whole.groups = _groups(stages)
    return whole


def _groups(stages: list[Foreign]) -> list[dict[str, Any]] | None:
    """Merges the parameter groups of all stages: groups with the same options become one."""
    found = list(stages[0].groups or [])
    for stage in stages[1:]:
        groups = stage.groups or []
        by_place = [one["options"] for one in groups] == [one["options"] for one in found]
        for i, group in enumerate(groups):
            alike = [one for one in found if one["options"] == group["options"]]
            alike = [found[i]] if by_place else alike
            if len(alike) > 1:
                stages[0].notes.append(
                    "options of the optimizer are left out: the groups of the stages do not match"
                )
                return None
            if alike:
                alike[0]["params"] = sorted({*alike[0]["params"], *group["params"]})
            else:
                found.append(group)
    return found or None


def _check_alike(first: Foreign, other: Foreign) -> None:
    for key in ("steps", "skipped"):
        if getattr(first, key) != getattr(other, key):
            raise RuntimeFault(
                f"[convert::deepspeed] the ranks saved their files at different times: {key} is "
                f"{getattr(first, key)} in one file and {getattr(other, key)} in another"
            )
    first.notes += [note for note in other.notes if note not in first.notes]


# ---- files of layers


def add_layers(found: Foreign, layers: dict[int, Any], buffers: set[str]) -> None:
    """Adds the buffers and frozen weights in the layer files, and renames tied parameters.

    DeepSpeed names tied parameters "tied_modules.KEY.weight". Here, as in PipelineModule, such a
    parameter is named after the first layer that has it.

    Args:
        layers: the layers' state_dict() by layer index.
        buffers: DeepSpeed's names of buffers.

    Raises:
        RuntimeFault: a layer's file is missing; no layer has a tied module's weights.
    """
    weights = {one.name: one for one in found.entries if one.role == "param"}
    places = {int(m[1]) for name in weights.keys() | buffers if (m := _LAYER.match(name))}
    if places - layers.keys():
        raise RuntimeFault(
            f"[convert::deepspeed] the files of layers {sorted(places - layers.keys())} are missing"
        )
    owner: dict[str, str] = {}  # prefix of a tied module -> prefix of its first layer
    for index, held in sorted(layers.items()):
        prefix = _prefix(index, held, weights, buffers)
        if prefix in owner:
            for key in held:
                found.tied[f"{index}.{key}"] = prefix + key
            continue
        if prefix.startswith(_TIED):
            owner[prefix] = f"{index}."
        for key, value in held.items():
            name = prefix + key
            if name not in weights and isinstance(value, torch.Tensor):
                found.add("buffer" if name in buffers else "weight", name, value)
    unowned = sorted(n for n in weights if n.startswith(_TIED) and _of_tied(n) not in owner)
    if unowned:
        raise RuntimeFault(
            f"[convert::deepspeed] no layer file has the values of {', '.join(unowned)}, so it is "
            f"not known to which layer they belong: DeepSpeed writes no layer file for a tied "
            f"layer with forward_fn"
        )
    _rename(found, owner)


def _prefix(index: int, held: Any, weights: dict[str, Entry], buffers: set[str]) -> str:
    """Returns the prefix of a layer's parameter names in the module."""
    own = f"{index}."
    known = weights.keys() | buffers
    if any(own + key in known for key in held):
        return own
    for prefix in dict.fromkeys(_of_tied(name) for name in weights if name.startswith(_TIED)):
        shared = [key for key in held if prefix + key in weights]
        if (
            shared
            and all(prefix + key in known for key in held)
            and all(_is(weights[prefix + key], held[key]) for key in shared)
        ):
            return prefix
    return own


def _of_tied(name: str) -> str:
    return ".".join(name.split(".")[:2]) + "."


def _is(entry: Entry, value: torch.Tensor) -> bool:
    """Whether the layer's value is this fp32 weight, cast to the layer's dtype."""
    return tuple(value.shape) == entry.shape and torch.equal(entry.read().to(value.dtype), value)


def _rename(found: Foreign, owner: dict[str, str]) -> None:
    def named(name: str) -> str:
        return owner[_of_tied(name)] + name[len(_of_tied(name)) :] if _is_tied(name) else name

    def _is_tied(name: str) -> bool:
        return name.startswith(_TIED) and _of_tied(name) in owner

    for one in found.entries:
        one.name = named(one.name)
    found.updates = {named(name): count for name, count in found.updates.items()}
    found.own = {named(name): kept for name, kept in found.own.items()}
    found.tied = {named(other): named(name) for other, name in found.tied.items()}
    for group in found.groups or []:
        group["params"] = sorted(named(name) for name in group["params"])
    found.notes += [f'"{tied[:-1]}" is renamed "{layer[:-1]}"' for tied, layer in owner.items()]


# ---- parts


@dataclasses.dataclass
class _Parts:
    """The ranks' parts of a parameter or buffer, and of its optimizer state, by role."""

    name: str
    of_roles: dict[str, list[Entry]]

    def weights(self) -> list[Entry]:
        return next(parts for role, parts in self.of_roles.items() if role in _WEIGHTS)

    def are_equal(self) -> bool:
        return all(cuts.equal([one.read() for one in p]) for p in self.of_roles.values())

    def tell(self) -> bool:
        return any(cuts.telling(parts[0].read()) for parts in self.of_roles.values())


def of_parts(ranks: list[Foreign], rules: Rules, info: dict[str, Any]) -> Foreign:
    """Joins the ranks' parts of each parameter and of its optimizer state.

    Args:
        rules: the user's description of the cuts.
        info: the checkpoint's `universal_checkpoint_info`, or {}.

    Raises:
        ConfigError: the cut of some parameters is unknown (the error lists them), or a description
            contradicts the files.
        RuntimeFault: the ranks have different parameters or counts.
    """
    whole = ranks[0]
    for other in ranks[1:]:
        _check_alike(whole, other)
    parts = _by_name(ranks)
    if any((whole.updates, whole.own) != (one.updates, one.own) for one in ranks):
        raise RuntimeFault("[convert::deepspeed] the model ranks have different step counts")
    how: dict[str, Cut] = {}
    unknown: list[str] = []
    rules = cuts.checked(rules)
    unused = set(rules)
    for name, one in parts.items():
        cut = _how(one, rules, info, unused)
        if cut is None:
            shapes = [tuple(entry.shape) for entry in one.weights()]
            unknown.append(f"{name} {' '.join(map(str, shapes))}")
        else:
            how[name] = cut
    if unknown:
        raise ConfigError(
            f"[convert::deepspeed] it is not known how the model ranks cut {', '.join(unknown)}"
            f" (shapes by rank). Describe it with --rules FILE, a JSON object of name patterns: "
            f'{{"*.qkv": "column:3", "*.proj": "row", "*.norm": "whole"}}'
        )
    if unused:
        raise ConfigError(f"[convert::rules] the rules {sorted(unused)} match no parameter")
    whole.entries = [
        _joined(role, one, how[name]) for name, one in parts.items() for role in one.of_roles
    ]
    if any(other.groups != whole.groups for other in ranks):
        whole.notes.append("options of the optimizer are taken from the first model rank")
    whole.notes.append("client_state is taken from the first model rank")
    return whole


def _by_name(ranks: list[Foreign]) -> dict[str, _Parts]:
    found: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for entry in rank.entries:
            found[entry.name][entry.role].append(entry)
    uneven = sorted(
        {n for n, roles in found.items() if any(len(p) != len(ranks) for p in roles.values())}
    )
    if uneven:
        raise RuntimeFault(
            f"[convert::deepspeed] only some of the {len(ranks)} model ranks have "
            f"{', '.join(uneven)}"
        )
    return {name: _Parts(name, dict(roles)) for name, roles in found.items()}


def _how(one: _Parts, rules: Rules, info: dict[str, Any], unused: set[str]) -> Cut | None:
    name, shapes = one.name, [entry.shape for entry in one.weights()]
    said = cuts.of_rules(rules, name, len(shapes[0]))
    if said is not None:
        unused.discard(said[0])
        _check(one, said[1], f'--rules "{said[0]}"', by_user=True)
        return said[1]
    is_param = "param" in one.of_roles
    cut = cuts.of_info(info, name, len(shapes[0])) if info and is_param else None
    whole = cut is None and one.are_equal()
    if cut is not None:
        _check(one, cut, "universal_checkpoint_info")
        return cut
    return cuts.WHOLE if whole and one.tell() else None


def _check(one: _Parts, cut: Cut, who: str, by_user: bool = False) -> None:
    shapes = [entry.shape for entry in one.weights()]
    if cut.shape(shapes) is None:
        raise ConfigError(
            f'[convert::deepspeed] the cut of "{one.name}" in {who} does not fit its shapes '
            f"{shapes}: {cut}"
        )
    if cut.dim < 0 and not cut.average and not one.are_equal():
        raise ConfigError(
            f'[convert::deepspeed] "{one.name}" is whole on every model rank according to {who}, '
            f"but its values differ"
        )
    if cut.dim >= 0 and not by_user and one.tell() and one.are_equal():
        raise ConfigError(
            f'[convert::deepspeed] "{one.name}" is cut according to {who}, but all model ranks '
            f"have the same values: describe its cut with --rules"
        )


def _joined(role: str, one: _Parts, cut: Cut) -> Entry:
    parts = one.of_roles[role]
    shape = cut.shape([entry.shape for entry in parts])
    if shape is None or any(entry.dtype != parts[0].dtype for entry in parts):
        raise RuntimeFault(
            f'[convert::deepspeed] the parts of "{one.name}" ({role.removeprefix(OWN)}) do not '
            f"fit together: {[(entry.shape, str(entry.dtype)) for entry in parts]}"
        )
    return Entry(role, one.name, shape, parts[0].dtype, _reading(parts, cut))


def _reading(parts: list[Entry], cut: Cut) -> Callable[[], torch.Tensor]:
    return lambda: cut.join([part.read() for part in parts])
