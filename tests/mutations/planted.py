"""What a bug is that run.py plants, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """A C++ test program: quick to build, so it is what catches most bugs."""

    path: str  # in the build folder; its name is its target's
    arguments: tuple[str, ...] = ()


class Pytest(NamedTuple):
    """What only users of the Python front can see."""

    arguments: tuple[str, ...]
    targets: tuple[str, ...] = ()  # to build beside the package


# Random tables in random loops, on ranks that are threads.
TABLES = Program("tests/parity/tables/tables_test", ("--draws", "0:20"))


class Mutation(NamedTuple):
    name: str
    file: str
    old: str  # must be there once
    new: str
    test: Program | Pytest = TABLES


def gtest(path: str, pattern: str) -> Program:
    return Program(path, (f"--gtest_filter={pattern}",))


def ranks(pattern: str) -> Program:
    return gtest("tests/ranks/ranks_test", pattern)


def draw(seed: int) -> Program:
    return Program(TABLES.path, ("--draw", str(seed)))
