"""Writes docs/idioms.md from the table in tests/parity/idioms.

`tools/idioms.py` writes the page; `tools/idioms.py --check` fails where it is not up to date.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "idioms.md"
HEAD = """# Idioms

Made from the table in `tests/parity/idioms` by `tools/idioms.py`; do not edit. {count} things that
people do to a model, an optimizer, a parameter, a gradient, a hook or a module around a training
loop, and what comes of each with an engine. Every row is a test (`tests/parity/test_idioms.py`).

- *as torch*: losses and weights are those of plain torch in one process on the whole batch.
- *refused*: every rank gets an error, there or at the engine's next call, that says what to do.
- *as torch or refused*: one of the two; which of them depends on sizes and cells.
- *an error, as in torch*: torch raises, and so does the engine.

A strategy that shards parameters has them whole on one rank: rows that only it refuses are then as
torch or refused.
"""


def page() -> str:
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    import idioms  # noqa: PLC0415 - its place is known only now

    rows = idioms.every()
    lines = [HEAD.format(count=len(rows))]
    group = ""
    for row in rows.values():
        if row.group != group:
            group = row.group
            lines += [
                f"\n## {group}\n",
                "| | `ddp` `zero1` `zero2` | `zero3` `hpz` |",
                "|---|---|---|",
            ]
        name = row.name.replace("|", "\\|")
        lines.append(f"| {name} | {row.whole.told} | {row.sharded.told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"idioms: {PAGE.relative_to(ROOT)} is not what the table says: run tools/idioms.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
