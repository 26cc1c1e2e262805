"""What a row of the table is, and what may come of it."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WHOLE = ("ddp", "zero1", "zero2")  # parameters rest whole
SHARDED = ("zero3", "hpz")
IN_MEMORY = ("device", "host")  # tiers
TIERS: dict[str, dict[str, str]] = {
    "device": {},
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk", "params": "disk", "gradients": "disk"},
}


@dataclass(frozen=True)
class Outcome:
    """`words` are in the text of the error, if there is one. Before torch `since` (major, minor)
    plain torch may raise, and the row has nothing to be compared with."""

    kind: str
    words: tuple[str, ...] = ()
    since: tuple[int, int] = (0, 0)

    @property
    def told(self) -> str:
        """In the documents."""
        return {"refused": "refused", "raises": "an error, as in torch"}.get(self.kind, self.kind)


AS_TORCH = Outcome("as torch")
SINCE_2_12 = Outcome("as torch", since=(2, 12))


def refused(*words: str) -> Outcome:
    """An error of the engine on every rank, where torch has none."""
    return Outcome("refused", words)


def raises(*words: str) -> Outcome:
    """Torch raises, too."""
    return Outcome("raises", words)


def either(*words: str, since: tuple[int, int] = (0, 0)) -> Outcome:
    """What torch gives, or an error: it depends on sizes."""
    return Outcome("as torch or refused", words, since)


@dataclass(frozen=True)
class Cell:
    strategy: str = "zero3"
    precision: str = "fp32"
    world: int = 2
    tier: str = "device"
    accumulate: int = 1

    def config(self, folder: str) -> dict[str, Any]:
        offload: dict[str, str] = dict(TIERS[self.tier])
        if self.tier == "disk":
            offload["path"] = folder
        moves = self.strategy in SHARDED
        return {
            "strategy": self.strategy,
            "precision": self.precision,
            "batch": {"accumulate": self.accumulate},
            "offload": offload,
            # Where parameters move, each unit moves by itself.
            "comm": {"timeout_s": 20} | ({"bucket_bytes": 0} if moves else {}),
            "mesh": {"node": 1} if self.strategy == "hpz" else {},
        }

    def __str__(self) -> str:
        return (
            f"{self.strategy}-{self.precision}-world{self.world}-{self.tier}"
            f"-accumulate{self.accumulate}"
        )


def _cells() -> list[Cell]:
    axes = itertools.product((*WHOLE, *SHARDED), ("fp32", "bf16"), (1, 2), TIERS, (1, 2))
    cells = [Cell(*axis) for axis in axes]
    return [
        cell
        for cell in cells
        if (cell.tier != "disk" or cell.strategy == "zero3")
        and (cell.strategy != "hpz" or (cell.world == 2 and cell.tier == "device"))
    ]


@dataclass(frozen=True)
class Idiom:
    """One thing that people do to a model, an optimizer or a tensor while an engine trains."""

    name: str
    group: str
    body: Callable[[Any], dict[str, Any] | None]
    whole: Outcome = AS_TORCH
    sharded: Outcome = AS_TORCH
    alone: Outcome = AS_TORCH  # parameters are sharded, over one rank
    rough: bool = False  # computes in bf16 whatever the cell says
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # values of a cell's fields

    def outcome(self, cell: Cell) -> Outcome:
        if cell.strategy in WHOLE:
            return self.whole
        return self.sharded if cell.world > 1 else self.alone

    def cells(self) -> list[Cell]:
        """Each strategy, precision and tier that it is for, with some world and accumulation."""
        return self._draw(lambda cell: (cell.strategy, cell.precision, cell.tier))

    def sample(self) -> list[Cell]:
        """For every day."""
        return self._draw(lambda _: None)

    def _draw(self, kind_of: Callable[[Cell], Any]) -> list[Cell]:
        """A cell of each kind; the same each time, and others for another name."""
        draw = random.Random(hashlib.sha256(self.name.encode()).digest())
        kinds: dict[Any, list[Cell]] = {}
        for cell in _cells():
            if all(getattr(cell, name) in values for name, values in self.only.items()):
                kinds.setdefault(kind_of(cell), []).append(cell)
        chosen = []
        for cells in kinds.values():
            # One rank is rarer, for it is the least of the cases.
            several = [cell for cell in cells if cell.world > 1]
            chosen.append(draw.choice(several if several and draw.random() < 0.75 else cells))
        return chosen


class Group:
    """Rows on one subject; a decorator that adds one."""

    def __init__(self, name: str):
        self.name = name
        self.idioms: list[Idiom] = []

    def __call__(
        self,
        name: str,
        outcome: Outcome = AS_TORCH,
        *,
        sharded: Outcome | None = None,
        alone: Outcome | None = None,
        rough: bool = False,
        **only: tuple[Any, ...],
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """`sharded` where parameters are: `outcome` unless it is given. Over one rank a sharded
        parameter may be whole: `alone` is then what holds."""
        over_several = sharded or outcome
        over_one = alone or (over_several if sharded is None else either(*over_several.words))

        def add(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
            made = Idiom(name, self.name, body, outcome, over_several, over_one, rough, only)
            self.idioms.append(made)
            return body

        return add
