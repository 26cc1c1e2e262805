"""Prints what a build cost, folder by folder, from the .ninja_log of a build tree.

    python tools/build_times.py build/release [OTHER_TREE]

Seconds are summed over compiler and linker runs: with -j2 the wall time is about half. A second
tree is printed beside the first, to compare builds before and after a change. A build that took
objects from ccache does not show what compiling costs: build with CCACHE_DISABLE=1.
"""

from __future__ import annotations

import argparse
import collections
import pathlib


def seconds(tree: pathlib.Path) -> dict[str, tuple[int, float]]:
    """Returns, by folder, how many outputs were built, and the seconds of their last builds."""
    runs: dict[str, float] = {}
    for line in (tree / ".ninja_log").read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        runs[output] = (int(end) - int(start)) / 1000
    folders: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for output, spent in runs.items():
        name = folder(output)
        count, total = folders[name]
        folders[name] = (count + 1, total + spent)
    return folders


def folder(output: str) -> str:
    """Returns the source folder of an output. Tests beside sources count separately."""
    if "cmake_pch" in output:
        return "precompiled header"
    place = output.partition("/CMakeFiles/")[0] if "/CMakeFiles/" in output else output
    if place == output:
        place = output.rpartition("/")[0] or "build tree"
    return f"{place}, tests" if "_test" in output and place.startswith("src/") else place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=pathlib.Path, metavar="TREE")
    trees = [seconds(tree) for tree in parser.parse_args().trees]
    print(f"{'folder':32}" + "   outputs  seconds" * len(trees))
    for name in sorted(set().union(*trees)):
        cells = [tree.get(name, (0, 0.0)) for tree in trees]
        print(f"{name[:32]:32}" + "".join(f"{count:10}{spent:9.1f}" for count, spent in cells))
    sums = [(sum(c for c, _ in t.values()), sum(s for _, s in t.values())) for t in trees]
    print(f"{'all':32}" + "".join(f"{count:10}{spent:9.1f}" for count, spent in sums))


if __name__ == "__main__":
    main()
