"""What a checkpoint of another library holds, in the words of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front.json_values import encode, encode_scalar

OWN = "optim."  # begins the role of what a user's own optimizer keeps
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
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
            self.notes.append(f'state "{key}" of "{name}" is left out: not by element')
            return
        role = key if key in MOMENTS else OWN + key
        self.entries.append(
            Entry(role, name, shape, value.dtype, read or (lambda: value.reshape(shape)))
        )

    def finish(self) -> None:
        """Names without what wrappers put before them; a count of steps for every moment.

        Raises:
            ConfigError: Adam's moments without their count, by which they are corrected.
        """
        weights = [one.name for one in self.entries if one.role in ("param", "weight", "buffer")]
        for prefix in _WRAPPERS:
            if weights and all(name.startswith(prefix) for name in weights):
                self.notes.append(f'names lost their "{prefix}"')
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
                    f'[convert] "{one.name}" has moments of Adam and no count of steps'
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
