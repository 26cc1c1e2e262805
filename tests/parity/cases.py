"""The parity matrices, and samples of them for every day."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable

import zoo
from training import Case

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
NODE_STRATEGIES = ["hpz", "mics"]  # two nodes of two ranks
MOVE_PARAMS = ["zero3", "hpz", "mics"]
PRECISIONS = ["fp32", "bf16"]
ACCUMULATE = [1, 3]
RECOMPUTE = ["off", "reentrant", "nonreentrant"]
MODELS = ["gpt", "awkward"]
WORLDS = [1, 2, 3, 4]
ZOO_SAMPLE = 60


def _layouts() -> list[tuple[int, str]]:
    return [
        (world, strategy)
        for world in WORLDS
        for strategy in STRATEGIES + ([*NODE_STRATEGIES, "hpz_host"] if world == 4 else [])
    ]


def matrix() -> list[Case]:
    cases = [
        Case(strategy, precision, accumulate, world, recompute, model)
        for world, strategy in _layouts()
        for precision in PRECISIONS
        for accumulate in ACCUMULATE
        for recompute in RECOMPUTE
        for model in MODELS
    ]
    # Clipping is one more axis that need not double the matrix.
    flip = random.Random(0)
    return [Case(**vars(case) | {"clip": flip.random() < 0.5}) for case in cases]


def zoo_matrix() -> list[Case]:
    return [
        Case(strategy, precision, accumulate, world, model=model)
        for world, strategy in _layouts()
        for model in zoo.ZOO
        for precision in zoo.ENTRIES[model].precisions
        for accumulate in ACCUMULATE
    ]


def _pairs(case: Case) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(vars(case).items(), 2))


def _sample(
    cases: list[Case], first: Callable[[Case], Hashable], limit: int | None = None
) -> list[Case]:
    """Every value of first(case), then every pair of values as far as `limit` allows; the rest
    differs from these in combinations of three."""
    shuffled = list(cases)
    random.Random(1).shuffle(shuffled)
    pairs = {case: _pairs(case) for case in shuffled}
    chosen: list[Case] = []
    seen: set[tuple[tuple[str, object], ...]] = set()
    firsts: set[Hashable] = set()

    def gain(case: Case) -> int:
        return 100 * (first(case) not in firsts) + len(pairs[case] - seen)

    while limit is None or len(chosen) < limit:
        best = max(shuffled, key=gain)
        if gain(best) == 0:
            break
        chosen.append(best)
        seen |= pairs[best]
        firsts.add(first(best))
    return sorted(chosen, key=cases.index)


def sample() -> list[Case]:
    return _sample(matrix(), lambda case: (case.strategy, case.precision, case.world))


def zoo_sample() -> list[Case]:
    """Every model where parameters move unit by unit, and where they stay or move together."""

    def moves(case: Case) -> tuple[str, bool]:
        return case.model, case.strategy in MOVE_PARAMS and case.world % 2 == 0

    return _sample(zoo_matrix(), moves, ZOO_SAMPLE)


def tensor_matrix() -> list[Case]:
    """Meshes with tensor ranks."""
    meshes = [(world, tensor) for world, tensor in [(2, 2), (4, 2), (4, 4), (6, 2)]]
    flip = random.Random(0)
    return [
        Case(
            strategy, precision, accumulate, world, recompute, "parts", flip.random() < 0.5, tensor
        )
        for world, tensor in meshes
        for strategy in STRATEGIES + (NODE_STRATEGIES if world // tensor == 2 else [])
        for precision in [*PRECISIONS, "fp16"]
        for accumulate in ACCUMULATE
        for recompute in RECOMPUTE
    ]


def tensor_sample() -> list[Case]:
    return _sample(tensor_matrix(), lambda case: (case.strategy, case.world, case.tensor), 20)
