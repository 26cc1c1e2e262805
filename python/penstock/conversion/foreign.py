"""What a checkpoint of another library holds, in the words of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.json_values import encode

OWN = "optim."  # begins the role of what a user's own optimizer keeps
MOMENTS = frozenset(_penstock.moment_names())


@dataclasses.dataclass
class Entry:
    """A tensor; `read` gives its values, on the CPU."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    same_as: str = ""  # name of another one of its role, whose values it shares


@dataclasses.dataclass
class Foreign:
    kind: str
    entries: list[Entry] = dataclasses.field(default_factory=list)
    steps: int = 0
    skipped: int = 0
    updates: dict[str, int] = dataclasses.field(default_factory=dict)  # by parameter
    own: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    groups: list[dict[str, Any]] | None = None  # of the optimizer: "options", "params"
    scheduler: Any = None  # its state
    tied: dict[str, str] = dataclasses.field(default_factory=dict)  # other names of parameters
    client_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # what is not taken over

    def add(self, role: str, name: str, value: torch.Tensor) -> None:
        shape = tuple(value.shape)
        self.entries.append(Entry(role, name, shape, value.dtype, lambda: value))

    def add_moment(
        self, name: str, key: str, value: Any, shape: Iterable[int], read: Any = None
    ) -> None:
        """What an optimizer keeps under `key` for a parameter.

        Args:
            value: a number, or a tensor of one or of the parameter's elements.
            shape: the parameter's.
            read: gives the tensor, where `value` is an example of it alone.
        """
        shape = tuple(shape)
        if key == "step":
            self.updates[name] = int(value)
            self.steps = max(self.steps, self.updates[name])
        one = isinstance(value, torch.Tensor) and value.dim() == 0
        if not isinstance(value, torch.Tensor) or one:
            scalar = value.item() if isinstance(value, torch.Tensor) else value
            kept = encode(scalar, f'state "{key}" of "{name}"')
            if isinstance(value, torch.Tensor):
                kept = {"$tensor": kept, "dtype": str(value.dtype).removeprefix("torch.")}
            self.own.setdefault(name, {})[key] = kept
            return
        role = key if key in MOMENTS else OWN + key
        self.entries.append(
            Entry(role, name, shape, value.dtype, read or (lambda: value.reshape(shape)))
        )

    def add_options(self, group: dict[str, Any], params: Iterable[str]) -> None:
        """A parameter group: its options but those that have no form in JSON."""
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
        """The value in its form for JSON, or None with a note."""
        try:
            return encode(value, what)
        except ConfigError as error:
            self.notes.append(f"{what} is left out: {str(error).partition('] ')[2]}")
            return None
