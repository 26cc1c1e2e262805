"""The contents of another library's checkpoint, with Penstock's roles and names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front.json_values import encode, encode_scalar

OWN = "optim."  # prefix of the roles of state that a user's own optimizer keeps
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DistributedDataParallel and torch.compile
MOMENTS = frozenset(_penstock.moment_names())


@dataclasses.dataclass
class Entry:
    """A tensor of the checkpoint. `read` returns its values on the CPU."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    same_as: str = ""  # name of an entry with the same role whose values it shares


@dataclasses.dataclass
class Foreign:
    """The contents of a checkpoint that another library wrote."""

    kind: str  # the name of its format
    entries: list[Entry] = dataclasses.field(default_factory=list)
    steps: int = 0
    skipped: int = 0
    updates: dict[str, int] = dataclasses.field(default_factory=dict)  # updates by parameter
    own: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # numbers by parameter
    loss_scale: dict[str, Any] | None = None
    groups: list[dict[str, Any]] | None = None  # parameter groups: "options", "params"
    scheduler: Any = None  # the scheduler's state
    tied: dict[str, str] = dataclasses.field(default_factory=dict)  # other name -> parameter
    client_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # messages about lost contents

    def add(self, role: str, name: str, value: torch.Tensor) -> None:
        shape = tuple(value.shape)
        self.entries.append(Entry(role, name, shape, value.dtype, lambda: value))

    def add_moment(
        self, name: str, key: str, value: Any, shape: Iterable[int], read: Any = None
    ) -> None:
        """Adds the optimizer state `key` of a parameter.

        Args:
            value: a number, a tensor with one element, or one with the parameter's number of them.
            shape: the parameter's shape.
            read: returns the tensor; `value` is then only an example with its dtype.
        """
        shape = tuple(shape)
        single = not isinstance(value, torch.Tensor) or value.dim() == 0
        if key == "step":
            value = value.reshape(()) if isinstance(value, torch.Tensor) else value
            self.updates[name] = int(value)
            self.steps = max(self.steps, self.updates[name])
            single = True
        if single:
            self.own.setdefault(name, {})[key] = encode_scalar(value, f'state "{key}" of "{name}"')
            return
        if read is None and value.numel() != torch.Size(shape).numel():
            self.notes.append(
                f'state "{key}" of "{name}" is left out: it does not have one value per element'
            )
            return
        role = key if key in MOMENTS else OWN + key
        self.entries.append(
            Entry(role, name, shape, value.dtype, read or (lambda: value.reshape(shape)))
        )

    def finish(self) -> None:
        """Removes the prefixes of wrappers from names, and completes the counts of updates.

        Raises:
            ConfigError: Adam's moments have no step count, which their bias correction needs.
        """
        weights = [one.name for one in self.entries if one.role in ("param", "weight", "buffer")]
        for prefix in _WRAPPERS:
            if weights and all(name.startswith(prefix) for name in weights):
                self.notes.append(f'the prefix "{prefix}" was removed from all names')
                self._strip(prefix)
                return self.finish()
        uncounted = [
            one
            for one in self.entries
            if one.role not in ("param", "weight", "buffer") and one.name not in self.updates
        ]
        for one in uncounted:
            if one.role.removeprefix(OWN) == "exp_avg_sq":
                raise ConfigError(
                    f'[convert] "{one.name}" has the moments of Adam, but no step count, which '
                    f"their bias correction needs"
                )
        self.updates |= {one.name: max(1, self.steps) for one in uncounted}
        return None

    def _strip(self, prefix: str) -> None:
        def bare(name: str) -> str:
            return name.removeprefix(prefix)

        for one in self.entries:
            one.name, one.same_as = bare(one.name), bare(one.same_as)
        self.updates = {bare(name): count for name, count in self.updates.items()}
        self.own = {bare(name): kept for name, kept in self.own.items()}
        self.tied = {bare(other): bare(name) for other, name in self.tied.items()}
        for group in self.groups or []:
            group["params"] = sorted(bare(name) for name in group["params"])

    def add_options(self, group: dict[str, Any], params: Iterable[str]) -> None:
        """Adds a parameter group, without the options that JSON cannot represent."""
        options = {}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            one = isinstance(value, torch.Tensor) and value.numel() == 1
            taken = self.take(
                f"option {key!r} of a parameter group", value.item() if one else value
            )
            if taken is not None or value is None:
                options[key] = taken
        self.groups = [*(self.groups or []), {"options": options, "params": sorted(params)}]

    def take(self, what: str, value: Any) -> Any:
        """Returns the value in its JSON form. If it has none, returns None and adds a note."""
        try:
            return encode(value, what)
        except ConfigError as error:
            self.notes.append(f"{what} is left out: {str(error).partition('] ')[2]}")
            return None
