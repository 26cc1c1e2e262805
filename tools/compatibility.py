"""Writes docs/compatibility.md, the compatibility matrix, from test results.

A row is a model, loop, optimizer or feature; a column is a strategy. A cell is "works", "refused"
with the number of the error below the table, or empty if nothing was tested. Rows that work under
the same strategies form a list. If a test failed, the tool writes nothing.

A test counts if its id names one strategy. Its cell is "refused" if the test recorded a refusal:
`record_property("refused", "ConfigError: text of the error")`.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
LEAST_LISTED = 5  # least number of rows with the same cells for a list; fewer stay in the table
COLUMNS = ["ddp", "zero1", "zero2", "zero3", "hpz", "mics"]
SECTIONS = {
    "test_zoo": "Models",
    "test_loops": "Loops",
    "test_optimizers": "Optimizers",
    "test_tiers": "Tiers",
    "test_transformers": "Models of transformers, adapters of peft",
    "test_compile": "torch.compile",
    "test_known_bugs": "Bugs known from elsewhere",
}
# Parts of a test's id that the row's name leaves out: one cell covers all their values.
SETTING = re.compile(r"fp32|bf16|fp16|own|off|clip|world\d+|accumulate\d+")
HEAD = """# Compatibility

Generated from test results by `tools/compatibility.py`; do not edit. A cell covers all precisions,
world sizes and values of `batch.accumulate` that were tested for its row and strategy.

- *works*: the results agreed with plain torch (under "Tiers": with the same run in memory).
- *refused (n)*: every rank ended with error n of the list below the table.
- Empty cells, and strategies that a list does not name, were not tested.
"""

Matrix = dict[str, dict[str, dict[str, str]]]  # section, row, column -> cell


class Problem(Exception):
    """Raised if no matrix can be made from the results."""


def place_of(classname: str, name: str) -> tuple[str, str, str] | None:
    """Returns section, row and column of a test; None unless its id names just one strategy."""
    module = classname.rpartition(".")[2]
    function, _, parts = name.rstrip("]").partition("[")
    tokens = parts.split("-")
    columns = [token for token in tokens if token in COLUMNS]
    if module not in SECTIONS or len(columns) != 1:
        return None
    kept = [t for t in tokens if t != columns[0] and not SETTING.fullmatch(t)]
    words = [] if function == module else [function.removeprefix("test_")]
    row = ": ".join(text.replace("_", " ") for text in [*words, ", ".join(kept)] if text)
    return SECTIONS[module], row, columns[0]


def cell_of(case: ElementTree.Element) -> str:
    recorded = [p.get("value", "") for p in case.iter("property") if p.get("name") == "refused"]
    if not recorded:
        return "works"
    kind, _, text = recorded[0].partition(": ")
    sentence = re.split(r"\.\s|\.$|\n", re.sub(r"^\[[\w:]+\] ", "", text))[0]
    return f"refused: {kind.rpartition('.')[2]}: {sentence}"


def matrix_of(cases: Iterable[ElementTree.Element]) -> Matrix:
    matrix: Matrix = {title: {} for title in SECTIONS.values()}
    for case in cases:
        classname, name = case.get("classname", ""), case.get("name", "")
        place = place_of(classname, name)
        if place is None or case.find("skipped") is not None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise Problem(f"{classname}::{name} failed")
        section, row, column = place
        cell = cell_of(case)
        seen = matrix[section].setdefault(row, {}).setdefault(column, cell)
        if seen != cell:
            raise Problem(f"{name}: the cell is both `{seen}` and `{cell}`")
    if not any(matrix.values()):
        raise Problem("no test of the results names a strategy")
    return matrix


def lines_of(matrix: Matrix) -> Iterator[str]:
    yield HEAD.rstrip()
    for title, rows in matrix.items():
        if rows:
            yield f"\n## {title}"
            yield from section_lines(rows)


def section_lines(rows: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yields the rows that work under the same strategies, a table of others, and the errors."""
    listed: dict[str, list[str]] = {}
    for row, cells in rows.items():
        if set(cells.values()) == {"works"}:
            columns = " ".join(f"`{column}`" for column in COLUMNS if column in cells)
            listed.setdefault(columns, []).append(row)
    listed = {columns: names for columns, names in listed.items() if len(names) >= LEAST_LISTED}
    for columns, names in listed.items():
        yield f"\nWorks under {columns}:\n"
        yield from (f"- {name}" for name in names)
    known = {name for names in listed.values() for name in names}
    others = {row: cells for row, cells in rows.items() if row not in known}
    if others:
        yield f"\n| | {' | '.join(COLUMNS)} |"
        yield "|---" * (len(COLUMNS) + 1) + "|"
    errors: dict[str, int] = {}  # text -> its number below the table
    for row, cells in others.items():
        shown = [numbered(cells.get(column, ""), errors) for column in COLUMNS]
        yield f"| {' | '.join([row, *shown])} |"
    if errors:
        yield ""
    yield from (f"{number}. {text}" for text, number in errors.items())


def numbered(cell: str, errors: dict[str, int]) -> str:
    """Returns the cell, with its error replaced by a number; adds a new error to `errors`."""
    kind, _, text = cell.partition(": ")
    return f"{kind} ({errors.setdefault(text, len(errors) + 1)})" if text else cell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--junit", type=pathlib.Path, help="read these results; run no tests")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/compatibility.md")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, such as -- --full")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = options.junit or pathlib.Path(folder) / "results.xml"
        if options.junit is None:
            files = [str(next(ROOT.glob(f"tests/*/{name}.py"))) for name in SECTIONS]
            command = [sys.executable, "-m", "pytest", "-q", "-ojunit_family=xunit1"]
            command += [f"--junitxml={results}", *files]
            subprocess.run([*command, *options.pytest], cwd=ROOT, check=False)
        try:
            matrix = matrix_of(ElementTree.parse(results).iter("testcase"))
        except (Problem, OSError, ElementTree.ParseError) as problem:
            print(f"compatibility: {problem}", file=sys.stderr)
            return 1
    options.output.write_text("\n".join(lines_of(matrix)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
