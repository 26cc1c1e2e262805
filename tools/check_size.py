"""Fails on a function, file, public header or parameter list that is too long.

tools/size_exceptions.txt names what may stay too long, with a reason. It is a ratchet: its `max`
line equals the number of its entries, an entry that is no longer needed is an error, and a change
that raises `max` must argue for it. --self-test checks the C++ scanner.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
MAX_PUBLIC_HEADER_LINES = 200
MAX_PARAMETERS = 6
FOLDERS = ("include", "src", "python", "tools", "tests", "examples", "benchmarks", "cmake")

# What must not be scanned: comments, literals, preprocessor lines (with continuations).
NOISE = re.compile(
    r"//[^\n]*"
    r"|/\*.*?\*/"
    r'|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"
    r"|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
SCOPE = re.compile(r"^\s*(?:inline\s+)?(?:namespace\b|extern\b|(?:.*\b)?(?:class|struct|union)\b)")
NOT_A_NAME = {"decltype", "requires", "alignas", "noexcept", "__attribute__", "explicit", "if"}
AFTER_PARAMETERS = re.compile(
    r"^(?:\s|const\b|noexcept(?:\([^)]*\))?|override\b|final\b|mutable\b|&&?|->[^;{]*"
    r"|[A-Z_]+\([^)]*\)|requires\b[^{]*|=\s*(?:0|default|delete))*(?P<init>:(?!:).*)?$",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function definition, or a declaration (lines = 0)."""

    name: str
    line: int
    lines: int
    parameters: int


def blank_noise(text: str) -> str:
    """The text with comments, literals and preprocessor lines replaced by blanks."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return NOISE.sub(blank, text)


def matching(text: str, start: int, pair: str) -> int:
    """Index of the bracket that closes the one at `start`; the end of the text without one."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == pair[0]:
            depth += 1
        elif text[index] == pair[1]:
            depth -= 1
            if depth == 0:
                return index
    return len(text) - 1


def count_parameters(text: str) -> int:
    """Number of parameters in the text between a function's parentheses."""
    depth = 0
    commas = 0
    for index, char in enumerate(text):
        if char in "([{" or (char == "<" and text[index - 1 : index].strip(" <")):
            depth += 1
        elif char in ")]}" or (char == ">" and text[index - 1 : index] != "-"):
            depth -= 1
        elif char == "," and depth == 0:
            commas += 1
    return commas + 1 if text.strip() not in ("", "void") else 0


def head_of_function(head: str) -> tuple[str, int, bool] | None:
    """(name, parameters, has an initializer list) when the text before a { or ; is a function's."""
    for match in re.finditer(r"(operator\s*\(\)|operator[^\s(]+|~?[\w:~]+)\s*\(", head):
        name = match.group(1).strip()
        if name in NOT_A_NAME:
            continue
        if "=" in head[: match.start()].replace("==", "") and "template" not in head:
            return None
        close = matching(head, match.end() - 1, "()")
        after = AFTER_PARAMETERS.match(head[close + 1 :])
        if not after:
            return None
        parameters = count_parameters(head[match.end() : close])
        return name, parameters, after.group("init") is not None
    return None


def scan_cpp(text: str) -> Iterator[Function]:
    """The functions of a C++ source at namespace and class scope, lambdas counted as their part."""
    text = blank_noise(text)
    start = index = 0
    while index < len(text):
        char = text[index]
        if char == "(":
            index = matching(text, index, "()")
        elif char == "}":
            start = index + 1
        elif char in ";{":
            head = text[start:index]
            line = text.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
            found = head_of_function(head)
            if char == ";":
                if found:
                    yield Function(found[0], line, 0, found[1])
                start = index + 1
            elif found and found[2] and re.search(r"[\w>]\s*$", head):
                index = matching(text, index, "{}")  # member{value} in an initializer list
            elif found:
                index = matching(text, index, "{}")
                last = text.count("\n", 0, index) + 1
                yield Function(found[0], line, last - line + 1, found[1])
                start = index + 1
            elif SCOPE.match(head) and "=" not in head:
                start = index + 1
            else:  # an initializer or an enum
                index = matching(text, index, "{}")
        index += 1


def scan_python(text: str) -> Iterator[Function]:
    """Every function of a Python source; self and cls are not counted as parameters."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(1 for name in names if name.arg not in ("self", "cls"))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(node.name, node.lineno, lines, count)


def check_file(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(key for the exceptions file, message) of everything too long in one file."""
    lines = text.count("\n")
    limit = MAX_PUBLIC_HEADER_LINES if path.startswith("include/") else MAX_FILE_LINES
    if lines > limit:
        yield path, f"{path}: {lines} lines, at most {limit}"
    for function in scan_python(text) if path.endswith(".py") else scan_cpp(text):
        key = f"{path}:{function.name}"
        where = f"{path}:{function.line}: {function.name}"
        if function.lines > MAX_FUNCTION_LINES:
            yield key, f"{where} has {function.lines} lines, at most {MAX_FUNCTION_LINES}"
        if function.parameters > MAX_PARAMETERS:
            yield key, f"{where} has {function.parameters} parameters, at most {MAX_PARAMETERS}"


def sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every source file of ours."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".h", ".cpp", ".py"):
                yield file


def read_exceptions(lines: Iterable[str]) -> tuple[int, set[str]]:
    """(max, keys) of the exceptions file. Raises ValueError for an entry without a reason."""
    entries = [line.split(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    if not entries or entries[0][0] != "max" or any(len(entry) < 2 for entry in entries):
        raise ValueError("size_exceptions.txt: `max N`, then lines `path:function reason`")
    return int(entries[0][1]), {entry[0] for entry in entries[1:]}


def check(root: pathlib.Path) -> list[str]:
    """All problems of a tree, those of the exceptions file included."""
    found: dict[str, list[str]] = {}
    for file in sources(root):
        path = file.relative_to(root).as_posix()
        for key, message in check_file(path, file.read_text(encoding="utf-8")):
            found.setdefault(key, []).append(message)
    listed = root / "tools" / "size_exceptions.txt"
    maximum, excused = read_exceptions(listed.read_text(encoding="utf-8").splitlines())
    problems = [text for key, texts in found.items() if key not in excused for text in texts]
    problems += [f"{key}: no longer needed in {listed.name}" for key in excused - found.keys()]
    if len(excused) != maximum:
        problems.append(f"{listed.name}: {len(excused)} entries but max {maximum}; set it to match")
    return sorted(set(problems))


SAMPLE = """
namespace a { namespace b {
#define TRAP(x) {
enum class E { kOne, kTwo };
template <typename T, int N = 3>
int first(std::map<int, T> m, int n = f(1, 2), const char* s = "{,") {
  auto g = [&](int a, int b) { return a < b; };
  return g(1, 2) ? 1'000 : '}';
}
struct S : Base<int> {
  S(int a, int b) : a_{a}, b_(b), c_{1, 2} { if (a) { go(); } }
  bool operator==(const S&) const = default;
  int operator()(int a) const noexcept { return a; }
  virtual void seven(int a, int b, int c, int d, int e, int f, int g) = 0;
  std::array<int, 2> c_{{1, 2}};
  int a_ = 0, b_{};
};
}}  // namespace
auto value = std::vector<int>{1, 2};
TEST(Suite, Name) {
  /* } */
}
std::vector<std::pair<int, int>> last(void)
    const { return {}; }
"""
EXPECTED = [
    ("first", 5, 3),
    ("S", 1, 2),
    ("operator()", 1, 1),
    ("seven", 0, 7),
    ("TEST", 3, 2),
    ("last", 2, 0),
]


def self_test() -> int:
    """Checks the C++ scanner on a sample of awkward code."""
    got = [(f.name, f.lines, f.parameters) for f in scan_cpp(SAMPLE)]
    got = [entry for entry in got if entry[0] != "operator=="]
    if got != EXPECTED:
        print(f"self-test: expected {EXPECTED}\n           got      {got}")
        return 1
    print(f"self-test: {len(EXPECTED)} functions of the sample measured right")
    return 0


def main() -> int:
    """Prints what is too long in the tree this file is in (or in --root)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parents[1])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--list", action="store_true", help="every function: lines, parameters")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if args.list:
        for file in sources(args.root):
            scan = scan_python if file.suffix == ".py" else scan_cpp
            for function in scan(file.read_text(encoding="utf-8")):
                where = f"{file.relative_to(args.root)}:{function.line}"
                print(f"{function.lines:4} {function.parameters:2} {where} {function.name}")
        return 0
    problems = check(args.root)
    print("\n".join(problems) or "size: no function, file or parameter list too long")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
