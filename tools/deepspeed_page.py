"""Writes the table of keys in docs/deepspeed.md from the translator. --check fails if it is old."""

from __future__ import annotations

import argparse
import pathlib
import sys

from penstock._native import _penstock

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "deepspeed.md"
HEAD = "| key | status | native key, or reason |\n|---|---|---|\n"


FATES = ("taken", "no effect", "refused")


def table() -> str:
    """One row for the keys that share a status and a reason; in the order of FATES."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key, fate, note in _penstock.deepspeed_keys():
        rows.setdefault((fate, note), []).append(f"`{key}`")
    ordered = sorted(rows.items(), key=lambda row: FATES.index(row[0][0]))
    return HEAD + "".join(
        f"| {', '.join(keys)} | {fate} | {note} |\n" for (fate, note), keys in ordered
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, found, _ = text.partition(HEAD)
    if not found:
        sys.exit(f"{PAGE} has no table that begins with {HEAD!r}")
    made = before + table()
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        sys.exit(
            f"{PAGE.name} differs from the table of the translator; run tools/deepspeed_page.py"
        )


if __name__ == "__main__":
    main()
