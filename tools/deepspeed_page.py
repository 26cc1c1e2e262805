"""Writes docs/deepspeed_differences.md from tables of the tests and from the translator's keys.

The tables are tests/drop_in/differences.toml and launch_flags.toml. --check fails if the page is
old, or if a test that a row names does not exist.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import tomllib

from penstock._native import _penstock

ROOT = pathlib.Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "deepspeed_differences.md"
FATES = ("taken", "no effect", "refused")


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((TESTS / "drop_in" / name).read_text(encoding="utf-8"))


def differences(rows: list[dict[str, str]]) -> str:
    """A table for each area, in the order of the file."""
    made = ""
    for area in dict.fromkeys(row["area"] for row in rows):
        made += f"## {area}\n\n| what | DeepSpeed | here | test |\n|---|---|---|---|\n"
        for row in rows:
            if row["area"] == area:
                cells = (row["what"], row["deepspeed"] or "-", row["here"], f"`{row['test']}`")
                made += f"| {' | '.join(cells)} |\n"
        made += "\n"
    return made


def missing_tests(rows: list[dict[str, str]]) -> list[str]:
    """The tests that rows name and that do not exist."""
    missing = []
    for row in rows:
        path, _, name = row["test"].partition("::")
        file = TESTS / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text("utf-8")):
            missing.append(row["test"])
    return missing


def flags() -> str:
    found = read("launch_flags.toml")
    rows = (*found["flag"], *found["older"])
    return "".join(f"| `{row['names']}` | {row['effect']} |\n" for row in rows)


def keys() -> str:
    """One row for the keys that share a status and a reason; in the order of FATES."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key, fate, note in _penstock.deepspeed_keys():
        rows.setdefault((fate, note), []).append(f"`{key}`")
    ordered = sorted(rows.items(), key=lambda row: FATES.index(row[0][0]))
    return "".join(f"| {', '.join(keys)} | {fate} | {note} |\n" for (fate, note), keys in ordered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = read("differences.toml")
    made = found["about"] + "\n" + differences(found["row"])
    made += found["flags"] + flags() + "\n" + found["config"] + keys()
    if missing := missing_tests(found["row"]):
        sys.exit(f"differences.toml names tests that do not exist: {', '.join(missing)}")
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.is_file() or made != PAGE.read_text(encoding="utf-8"):
        sys.exit(f"{PAGE.name} differs from its tables; run tools/deepspeed_page.py")


if __name__ == "__main__":
    main()
