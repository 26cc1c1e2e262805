"""The parity matrix, and a sample of it for every day."""

from __future__ import annotations

import itertools
import random

from training import Case

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
NODE_STRATEGIES = ["hpz", "mics"]  # two nodes of two ranks
PRECISIONS = ["fp32", "bf16"]
ACCUMULATE = [1, 3]
RECOMPUTE = ["off", "reentrant", "nonreentrant"]
MODELS = ["gpt", "awkward"]
WORLDS = [1, 2, 3, 4]


def matrix() -> list[Case]:
    cases = [
        Case(strategy, precision, accumulate, world, recompute, model)
        for world in WORLDS
        for strategy in STRATEGIES + (NODE_STRATEGIES if world == 4 else [])
        for precision in PRECISIONS
        for accumulate in ACCUMULATE
        for recompute in RECOMPUTE
        for model in MODELS
    ]
    # Clipping is one more axis that need not double the matrix.
    flip = random.Random(0)
    return [Case(**vars(case) | {"clip": flip.random() < 0.5}) for case in cases]


def _tuples(case: Case, size: int) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(vars(case).items(), size))


def sample() -> list[Case]:
    """Every combination of strategy, precision and world size, and every pair of other values; the
    rest of the matrix differs from these in combinations of three."""
    cases = matrix()
    random.Random(1).shuffle(cases)
    chosen: list[Case] = []
    seen: set[tuple[tuple[str, object], ...]] = set()

    def gain(case: Case) -> int:
        combination = (case.strategy, case.precision, case.world)
        new = all(combination != (c.strategy, c.precision, c.world) for c in chosen)
        return 100 * new + len(_tuples(case, 2) - seen)

    while True:
        best = max(cases, key=gain)
        if gain(best) == 0:
            break
        chosen.append(best)
        seen |= _tuples(best, 2)
    return sorted(chosen, key=matrix().index)
