"""Lists the claims of README.md and docs/ with the test or command that backs each.

A claim is a sentence or table row with a measured figure, or a block of commands or code. claims.py
names what backs it. A text that is gone from its page is an error, and so is a test that does not
exist. Claims without backing are printed; --strict makes them errors.

    tools/check_claims.py [--all] [--strict]
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from claims import BLOCKS, CLAIMS, PAGES_OF_FIGURES

ROOT = pathlib.Path(__file__).parents[1]
UNIT = r"(?:%|ns|us|ms|s|seconds|nanoseconds|minutes|hours|[KMGT]i?B(?:/s)?|TFLOP/s|times)"
FIGURE = re.compile(
    rf"(?<![\w.:-])\d[\d.,]*(?:e-\d+)? ?{UNIT}(?![\w-])"
    r"|\b\d(?:\.\d+)?e-\d+|(?<![\w.])[01]\.\d\d(?![.\d])"
)
CODE = re.compile(r"`[^`]*`")


@dataclass(frozen=True)
class Found:
    """A claim as it stands on a page."""

    page: str
    line: int
    text: str
    block: bool = False


def sentences(text: str) -> Iterator[str]:
    yield from re.split(r"(?<=[.;:])\s+(?=[A-Z`*\[(0-9])", text)


def claims_of(page: str, text: str) -> Iterator[Found]:
    paragraph: list[str] = []
    start, fence = 0, 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            if fence:
                block = "\n".join(text.splitlines()[fence : number - 1])
                yield Found(page, fence, block, block=True)
            fence = 0 if fence else number
            line = ""
        elif fence:
            continue
        if line.strip() and not line.startswith(("|", "- ", "#")):
            start = start if paragraph else number
            paragraph.append(line.strip())
            continue
        for sentence in sentences(" ".join(paragraph)):
            if FIGURE.search(CODE.sub("", sentence)):
                yield Found(page, start, sentence)
        paragraph = [line.strip()[2:]] if line.startswith("- ") else []
        start = number
        if line.startswith("|") and FIGURE.search(CODE.sub("", line)):
            yield Found(page, number, line)


def problem_of(backing: str) -> str:
    """Returns why a backing does not exist: `path`, `path::text` or `make target`; else ""."""
    if backing.startswith("make "):
        target = backing.split()[1]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return "" if re.search(rf"^{target}:", makefile, re.M) else "no such target"
    path, _, name = backing.partition("::")
    file = ROOT / path.split()[0]
    if not file.exists():
        return "does not exist"
    if name and name not in file.read_text(encoding="utf-8"):
        return f"has no {name!r}"
    return ""


def backing_of(found: Found) -> str:
    for page, text, backing in CLAIMS:
        if page == found.page and text in " ".join(found.text.split()):
            return backing
    if found.block:
        for page, text, backing in BLOCKS:
            if page in ("*", found.page) and re.search(text, found.text, re.M):
                return backing
    return PAGES_OF_FIGURES.get(found.page, "")


def script_above(found: Found, text: str) -> str:
    """Returns the script that is named last before a figure of benchmarks/README.md."""
    lines = text.splitlines()[: found.line]
    paragraph = "\n".join([*lines, found.text])
    named = re.findall(r"`(\w+\.py)\b", paragraph)
    return f"benchmarks/{named[-1]}" if named else ""


def stale(pages: dict[str, str]) -> Iterator[str]:
    for page, *_ in [*CLAIMS, *BLOCKS]:
        if page not in ("*", *pages):
            yield f"{page} does not exist"
    for page, text, _ in CLAIMS:
        if page in pages and text not in " ".join(pages[page].split()):
            yield f"{page} no longer has {text!r}"
    yield from missing([*(one[2] for one in [*CLAIMS, *BLOCKS]), *PAGES_OF_FIGURES.values()])


def missing(backings: Iterable[str]) -> Iterator[str]:
    for one in {one for backing in backings for one in backing.split(", ") if one}:
        if problem := problem_of(one):
            yield f"{one!r}, which backs a claim, {problem}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="print backed claims, too")
    parser.add_argument("--strict", action="store_true", help="fail for claims without backing")
    options = parser.parse_args()
    files = [
        ROOT / "README.md",
        ROOT / "benchmarks/README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    pages = {str(one.relative_to(ROOT)): one.read_text(encoding="utf-8") for one in files}
    found = [claim for page, text in pages.items() for claim in claims_of(page, text)]
    backed = {claim: backing_of(claim) for claim in found}
    for claim in found:
        if claim.page == "benchmarks/README.md":
            backed[claim] = script_above(claim, pages[claim.page])
    bare = [claim for claim in found if not backed[claim]]
    for claim in found if options.all else bare:
        short = " ".join(claim.text.split())[:100]
        print(f"{claim.page}:{claim.line}: {short}\n    {backed[claim] or 'UNBACKED'}")
    problems = sorted({*stale(pages), *missing(backed.values())})
    for problem in problems:
        print(f"stale: {problem}")
    print(f"claims: {len(found)}, backed {len(found) - len(bare)}, unbacked {len(bare)}")
    if problems or (options.strict and bare):
        sys.exit(1)


if __name__ == "__main__":
    main()
