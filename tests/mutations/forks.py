"""Mistakes in forked processes."""

from __future__ import annotations

from planted import Mutation, Pytest

RANKS, CALLS = "python/penstock/front/ranks.py", "python/penstock/front/engine_calls.py"


def forked(tests: str) -> Pytest:
    return Pytest(("tests/python/test_forked.py", "-k", tests))


IN_FORKS = [
    Mutation(
        "a forked process destroys its copy of an engine",
        "python/src/kept.h",
        "if (getpid() == made_by) delete object;",
        "if (made_by > 0) delete object;",
        forked("zero3 or workers"),
    ),
    Mutation(
        "a forked process destroys its copies of process groups",
        RANKS,
        "if os.getpid() != made_by:  # to",
        "if not made_by:  # to",
        forked("gloo"),
    ),
    Mutation(
        "a forked process closes its parent's engine",
        CALLS,
        "if not self._ranks.copied:",
        "if self._ranks:",
        forked("scripts"),
    ),
    Mutation(
        "a forked process takes a signal for its parent's engine",
        "python/penstock/front/save_signals.py",
        "if one._open() and not one._ranks.copied]",
        "if one._open()]",
        forked("scripts"),
    ),
]
