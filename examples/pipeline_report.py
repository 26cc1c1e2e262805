"""Describes, as text, ranks that compute one model together: their stages, order and memory.

An engine does not report when its stages compute, so this module reads the engine's private
attributes, which may change.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from train_gpt import resident_mib

import penstock

WIDTH = 72  # columns of a measured step
KEPT_STEPS = 100
MEMORY = {"param": "parameters", "grad": "gradients", "optim": "optimizer", "total": "total"}


def gather(mine: Any) -> list[Any]:
    """Returns every rank's value, by rank. All ranks call it."""
    if not dist.is_initialized():
        return [mine]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


# ---- stages


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Returns each parameter's numel: of the whole before `initialize`, of the part after it."""
    return {name: param.numel() for name, param in model.named_parameters()}


def stage_pieces(engine: penstock.Engine) -> list[tuple[str, int]]:
    """Returns modules and their stages, in order; without a pipeline, the model itself ("")."""
    return engine._pipeline.ranks.pieces if engine._pipeline.active else [("", 0)]


def shorter(names: list[str]) -> str:
    """Shortens runs of names: blocks.0, blocks.1, head -> blocks.0-1, head"""

    def run_of(numbered: tuple[int, str]) -> tuple[str, int]:
        index, name = numbered
        before, _, number = name.rpartition(".")
        return (before, int(number) - index) if number.isdigit() else (name, -1)

    texts = []
    for _, run in itertools.groupby(enumerate(names), run_of):
        (_, first), *others = run
        last = f"-{others[-1][1].rpartition('.')[2]}" if others else ""
        texts.append(first + last)
    return ", ".join(texts)


def stage_table(engine: penstock.Engine, whole: dict[str, int]) -> str:
    """Returns a table of each stage: modules, number of parameters, and those of a tensor rank."""
    part = sizes_of(engine.module)
    pieces = stage_pieces(engine)
    num_stages, mesh = 1 + max(stage for _, stage in pieces), engine.config.mesh
    lines = [f"{'stage':<14}{'modules':<44}{'parameters':>11}{'of a tensor rank':>18}"]

    def line(title: str, modules: str, names: list[str]) -> None:
        numbers = [sum(sizes[name] for name in names) for sizes in (whole, part)]
        lines.append(f"{title:<14}{modules:<44}{numbers[0]:>11,}{numbers[1]:>18,}")

    of_stage: list[list[str]] = []
    for stage in range(num_stages):
        modules = [name for name, its in pieces if its == stage]
        inside = tuple(f"{name}." if name else "" for name in modules)
        of_stage.append([name for name in whole if name.startswith(inside)])
        line(str(stage), shorter(modules) or "the model", of_stage[-1])
    outside = [name for name in whole if name not in set().union(*of_stage)]
    if outside:
        line("every stage", shorter(sorted({n.rpartition(".")[0] for n in outside})), outside)
    for place in range(mesh.pipeline):
        own = range(place, num_stages, mesh.pipeline)
        names = set(outside).union(*(of_stage[stage] for stage in own))
        ranks = mesh.data * mesh.tensor * mesh.sequence
        first, last = place * ranks, (place + 1) * ranks - 1
        lines.append(
            f"rank {first}{f' to {last}' * (last > first)}: stage {', '.join(map(str, own))}, each "
            f"computes with {sum(part[name] for name in names):,} of "
            f"{sum(whole.values()):,} parameters"
        )
    return "\n".join(lines)


# ---- order


@dataclasses.dataclass
class Done:
    """A forward or backward of a stage, in seconds of a clock that all local processes share."""

    stage: int
    forward: bool
    micro: int
    begin: float
    end: float = 0.0
    waited: float = 0.0  # for the message with which it begins


class Clock:
    """Replaces the object that gives an engine its actions and messages; records their times.

    Attributes:
        windows: what this rank has done in its last calls of train_batch().
    """

    def __init__(self, engine: penstock.Engine) -> None:
        self.windows: collections.deque[list[Done]] = collections.deque(maxlen=KEPT_STEPS)
        self._now: Done | None = None
        if engine._pipeline.active:
            self._ranks, engine._pipeline.ranks = engine._pipeline.ranks, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def begin(self, num_micro: int, trains: bool) -> Iterator[Any]:
        actions = self._ranks.begin(num_micro, trains)
        return self._timed(actions) if trains else actions

    def _timed(self, actions: list[Any]) -> Iterator[Any]:
        self.windows.append([])
        for one in actions:
            self._now = Done(one.stage, one.forward, one.micro, time.monotonic())
            self.windows[-1].append(self._now)
            yield one
            self._now.end = time.monotonic()
        self._now = None

    def receive(self, action: Any) -> Any:
        began = time.monotonic()
        message = self._ranks.receive(action)
        if self._now is not None:
            self._now.waited += time.monotonic() - began
        return message


def before(one: Done, num_stages: int) -> tuple[int, bool, int] | None:
    """Returns the action that `one` waits for: (stage, forward, micro-batch)."""
    if one.forward:
        return (one.stage - 1, True, one.micro) if one.stage > 0 else None
    if one.stage == num_stages - 1:
        return (one.stage, True, one.micro)
    return (one.stage + 1, False, one.micro)


def in_slots(rows: list[list[Done]]) -> list[list[Done | None]]:
    """Returns each rank's actions by slot, if every action takes one slot of time; None is idle."""
    num_stages = 1 + max(one.stage for row in rows for one in row)
    left = [list(row) for row in rows]
    ended: set[tuple[int, bool, int] | None] = {None}
    slots: list[list[Done | None]] = [[] for _ in rows]
    while any(left):
        now = [row.pop(0) if row and before(row[0], num_stages) in ended else None for row in left]
        if not any(now):
            raise RuntimeError("the orders of the pipeline's ranks wait for each other")
        ended |= {(one.stage, one.forward, one.micro) for one in now if one is not None}
        for row, one in zip(slots, now, strict=True):
            row.append(one)
    return slots


def idle_share(slots: list[list[Done | None]]) -> float:
    cells = list(itertools.chain(*slots))
    return cells.count(None) / len(cells)


def schedule_picture(slots: list[list[Done | None]]) -> str:
    """Returns a row for each pipeline rank, with a column for each slot. F0 is the forward of
    micro-batch 0, B0 its backward; if ranks have several stages, 2F0 is the forward of stage 2."""
    several = 1 + max(one.stage for row in slots for one in row if one) > len(slots)

    def cell(one: Done | None) -> str:
        if one is None:
            return "."
        return f"{one.stage if several else ''}{'F' if one.forward else 'B'}{one.micro}"

    width = 1 + max(len(cell(one)) for row in slots for one in row)
    return "\n".join(
        f"pipeline rank {place} " + "".join(f"{cell(one):>{width}}" for one in row)
        for place, row in enumerate(slots)
    )


def measured_picture(rows: list[list[Done]]) -> str:
    """Returns a row for each pipeline rank, in columns of equal time: a micro-batch's digit in its
    forward, its letter (a is 0) in its backward, and a dot while the rank waits."""
    begin = min(one.begin for row in rows for one in row)
    end = max(one.end for row in rows for one in row)
    texts = []
    for place, row in enumerate(rows):
        cells = ["."] * WIDTH
        for one in row:
            name = str(one.micro % 10) if one.forward else chr(ord("a") + one.micro % 26)
            first, last = (
                int((at - begin) / (end - begin) * WIDTH)
                for at in (one.begin + one.waited, one.end)
            )
            cells[first : max(first + 1, last)] = [name] * max(1, last - first)
        texts.append(f"pipeline rank {place} |{''.join(cells[:WIDTH])}|")
    return "\n".join([*texts, f"one column is {1000 * (end - begin) / WIDTH:.1f} ms"])


def idle_measured(windows: list[list[list[Done]]]) -> float:
    """Returns the idle share of all ranks' time from the first begin to the last end of a window.

    A rank is idle outside forwards and backwards, and while one of these waits for a message. The
    result is the mean over `windows`, each of which has a row per rank.
    """
    shares = []
    for rows in windows:
        begin = min(one.begin for row in rows for one in row)
        end = max(one.end for row in rows for one in row)
        busy = sum(one.end - one.begin - one.waited for row in rows for one in row)
        shares.append(1 - busy / (len(rows) * (end - begin)))
    return sum(shares) / len(shares)


# ---- memory


def predicted_memory(engine: penstock.Engine) -> dict[str, int]:
    """Returns the strategy's predicted bytes by kind of state. Call it before the first step."""
    ledger = engine.ledger()
    return ledger["predicted"][ledger["strategy"]]


def memory_table(engine: penstock.Engine, predicted: dict[str, int]) -> str:
    """Returns a table of each rank's predicted and counted peaks. All ranks call it."""
    everyone = gather((predicted, engine.ledger()["measured"], resident_mib()))
    columns = dict(MEMORY)
    if any(told["disk"] for told, _, _ in everyone):
        columns["disk"] = "on disk"
    titles = "".join(f"{title:>16}" for title in columns.values())
    lines = ["MiB of each rank: predicted / measured peaks of the engine; RSS, which is measured"]
    lines.append(f"{'rank':<6}{titles}{'RSS now':>10}")
    for rank, (told, seen, resident) in enumerate(everyone):
        cells = "".join(f"{told[key] / 2**20:>9.2f} /{seen[key] / 2**20:>5.2f}" for key in columns)
        lines.append(f"{rank:<6}{cells}{resident:>10.0f}")
    lines.append(
        "activations, messages between ranks, torch and Python are in neither, only in the RSS"
    )
    return "\n".join(lines)


def one_machine() -> bool:
    """Whether all ranks are on this machine, according to the launcher's variables."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world if world == "1" else "") == world


def bubble_report(engine: penstock.Engine, clock: Clock) -> str:
    """Returns pictures of the order and the last step, and the idle share. All ranks call it."""
    mesh, parallel = engine.config.mesh, engine.config.parallel
    everyone = gather(list(clock.windows))
    if not engine._pipeline.active:
        return "no pipeline: there is one stage, for which no rank waits"
    of_place = mesh.data * mesh.tensor * mesh.sequence
    steps = list(zip(*everyone, strict=True))  # for each step, a row per rank
    slots = in_slots(steps[-1][::of_place])
    num_micro = 1 + max(one.micro for one in everyone[0][-1])
    fewest = mesh.pipeline - 1
    ideal = fewest / (num_micro * parallel.virtual_stages + fewest)
    lines = [
        f'the order "{parallel.schedule}", as the ranks ran it, if all took one slot of time:',
        schedule_picture(slots),
        f"idle: {100 * idle_share(slots):.1f} % of these slots; (P - 1) / (m + P - 1) is "
        f"{100 * ideal:.1f} % with P = {mesh.pipeline} ranks and m = "
        f"{num_micro * parallel.virtual_stages} micro-batches"
        + (f" x stages of a rank ({parallel.virtual_stages})" * (parallel.virtual_stages > 1)),
    ]
    if not one_machine():
        return "\n".join([*lines, "idle time is not measured: each machine has its own clock"])
    later = steps[1:] or steps  # the first step of a run is slower
    cores = len(os.sched_getaffinity(0))
    lines += [
        "the last step as measured, for one rank per stage (0 1 2: forwards of these micro-"
        "batches, a b c: their backwards, .: waiting):",
        measured_picture(steps[-1][::of_place]),
        f"idle: {100 * idle_measured(later):.1f} % of the time as measured, of all ranks and the "
        f"last {len(later)} steps; waits for data and tensor ranks count as work",
    ]
    if cores < len(everyone):
        lines.append(
            f"{len(everyone)} ranks share {cores} cores here: the measured times include "
            f"waits for a core, and a waiting rank leaves its core to others, so the idle time is "
            f"not only the bubble"
        )
    return "\n".join(lines)
