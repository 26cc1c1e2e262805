"""Fails if two types of the C++ sources have the same name and different meanings.

ALLOWED lists the names that several types may share, with the reason.
--self-test plants a second definition in a temporary tree and checks that it is found.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys
import tempfile

FOLDERS = ("src", "include", "python/src", "plugins")
ALLOWED = {
    "Impl": "the hidden half of a class",
    "Lane": "Status::Lane describes one of a rank's lanes",
}
TYPE = re.compile(
    r"^\s*(?:template <[^>]*> )?(?:struct|class|enum class|enum)\s+"
    r"(?:PENSTOCK_\w+ |alignas\(\w+\) )*"
    r"((?:\w+::)*\w+)(?: final)?(?: : [^;]*)? \{"
)


def definitions(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns where types are defined, by name without qualifiers. Tests do not count."""
    found = collections.defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cpp", ".cu"} or path.stem.endswith("_test"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if match := TYPE.match(line):
                    name = match[1].rpartition("::")[2]
                    found[name].append(f"{path.relative_to(root)}:{number}")
    return found


def problems(root: pathlib.Path) -> list[str]:
    """Returns a text for each name that is defined more than once."""
    return [
        f"{name} is defined {len(places)} times: {', '.join(places)}"
        for name, places in sorted(definitions(root).items())
        if len(places) > 1 and name not in ALLOWED
    ]


def self_test() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "src").mkdir()
        (root / "src/one.h").write_text("struct Same {\n};\nstruct Other;\n")
        (root / "src/two.cpp").write_text("class Outer::Other {\n};\n")
        assert not problems(root), problems(root)
        (root / "src/three.cpp").write_text("  struct Same {\n  };\n")
        assert problems(root) == ["Same is defined 2 times: src/one.h:1, src/three.cpp:1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true")
    if parser.parse_args().self_test:
        self_test()
        return 0
    found = problems(pathlib.Path(__file__).resolve().parent.parent)
    for text in found:
        print(f"names: {text}", file=sys.stderr)
    if not found:
        print("names: every type of the C++ sources has a name of its own")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
