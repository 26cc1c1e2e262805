"""Counts the lines of src/exec that know what a table says.

    python tools/table_mentions.py [--list] [--limit 40] [FOLDER]

src/exec executes a plan, so it should not look at roles, tiers, phases, tensor cuts, owners, cells
or predicates of the table: what they say belongs in the plan. Counted are the lines of code without
comments and tests that name one of them. With --limit, the exit status is 1 if there are more.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
KINDS = {
    "Role": r"\bRole::",
    "Tier": r"\bTier::",
    "Phase": r"\bPhase::",
    "TensorCut": r"\bTensorCut\b",
    "owners": r"\bowners\b",
    "Cells": r"\bcells\.",
}
COMMENT = re.compile(r"//.*")


def predicates() -> list[str]:
    """Returns the names of the table's methods that return bool."""
    header = (ROOT / "src/plan/table.h").read_text()
    return re.findall(r"^  bool (\w+)\(", header, re.MULTILINE)


def mentions(folder: pathlib.Path) -> list[tuple[str, str, str]]:
    """Returns (kind, place, line) of each line that is counted, once per line."""
    kinds = KINDS | {"predicate": r"(?:\.|->)(?:" + "|".join(predicates()) + r")\("}
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".h", ".cpp") or path.stem.endswith("_test"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = COMMENT.sub("", line)
            kind = next((k for k, pattern in kinds.items() if re.search(pattern, code)), None)
            if kind is not None:
                found.append((kind, f"{path.name}:{number}", code.strip()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=ROOT / "src/exec", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="print the lines")
    parser.add_argument("--limit", type=int, help="most lines")
    options = parser.parse_args()
    found = mentions(options.folder)
    if options.list:
        for kind, place, code in found:
            print(f"{kind:10} {place:28} {code}")
    for kind in (*KINDS, "predicate"):
        print(f"{kind:10} {sum(one == kind for one, _, _ in found):4}")
    print(f"{'all':10} {len(found):4}")
    return int(options.limit is not None and len(found) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
