"""Fails if a function, class, file, public header or parameter list is too long.

tools/size_exceptions.txt names what may stay too long, with a reason. It is a ratchet: its `max`
line equals the number of its entries, an entry that is no longer needed is an error, and a change
that raises `max` must give a reason. --self-test checks the scanners.

A class's methods are the functions declared in its body; constructors, destructors and operators
(in Python names with two underscores on each side) do not count, and nested classes count alone.
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
AS_DEEPSPEED = "python/penstock/as_deepspeed/"  # parameter lists are DeepSpeed's
MAX_PARAMETERS = 6
MAX_PUBLIC_METHODS = 20
MAX_METHODS = 30
FOLDERS = (
    "include",
    "src",
    "python",
    "plugins",
    "tools",
    "tests",
    "examples",
    "benchmarks",
    "cmake",
)

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
CLASS = re.compile(
    r"\b(?P<kind>class|struct|union)\s+(?:[A-Z_]+\s+)?(?P<name>[\w:]+)(?:<.*>)?(?:\s+final)?"
    r"\s*(?::(?!:).*)?$",
    re.DOTALL,
)
LABELS = re.compile(r"\s*(?:(?:public|protected|private)\s*:(?!:)\s*)*")
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


@dataclasses.dataclass
class Class:
    """A class definition and how many methods its body declares."""

    name: str
    line: int
    public_now: bool = True  # access of the next declaration
    public: int = 0
    methods: int = 0

    def add(self, is_public: bool) -> None:
        """Counts one method."""
        self.methods += 1
        self.public += is_public

    def after_labels(self, head: str) -> str:
        """Returns the head of a declaration without the access labels before it; records them."""
        labels = LABELS.match(head)
        for label in re.findall(r"\w+", labels.group() if labels else ""):
            self.public_now = label == "public"
        return head[labels.end() :] if labels else head

    def declare(self, head: str, function: str) -> None:
        """Counts a C++ function if it is a method of the class."""
        special = re.search(r"\boperator\b|\bfriend\b", head)
        if not special and function.lstrip("~") != self.name.rpartition(":")[2]:
            self.add(self.public_now)


def blank_noise(text: str) -> str:
    """Returns the text with comments, literals and preprocessor lines replaced by blanks."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return NOISE.sub(blank, text)


def matching(text: str, start: int, pair: str) -> int:
    """Returns the index of the bracket that closes the one at `start`, else of the text's end."""
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
    """Returns the number of parameters in the text between a function's parentheses."""
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
    """Returns (name, parameters, has an initializer list) if `head` is that of a function."""
    for match in re.finditer(r"(operator\s*\(\)|operator[^\s(]+|~?[\w:~]+)\s*\(", head):
        name = match.group(1).strip()
        if name in NOT_A_NAME:
            continue
        if "=" in head[: match.start()].replace("==", "") and "template" not in head:
            return None
        close = matching(head, match.end() - 1, "()")
        after = AFTER_PARAMETERS.match(head[close + 1 :])
        if not after:
            continue  # brackets of a type: std::function<void()> name(
        parameters = count_parameters(head[match.end() : close])
        return name, parameters, after.group("init") is not None
    return None


def class_of(head: str, line: int) -> Class:
    """Returns the class that `head` and { open; without a name for a namespace or an enum."""
    opened = CLASS.search(head)
    if opened is None or re.search(r"\benum\b", head):
        return Class("", line)
    return Class(opened["name"], line, public_now=opened["kind"] != "class")


def kind_of(head: str, end: str, found: tuple[str, int, bool] | None) -> str:
    """Returns what `head` and `end` begin: a declaration, function, scope, or braces of a value."""
    if end == ";":
        return "declaration"
    if found:  # the braces may be member{value} in an initializer list
        return "braces" if found[2] and re.search(r"[\w>]\s*$", head) else "function"
    return "scope" if SCOPE.match(head) and "=" not in head else "braces"


def scan_cpp(text: str) -> Iterator[Function | Class]:
    """Yields functions at namespace and class scope (with their lambdas), and named classes."""
    text = blank_noise(text)
    scopes = [Class("", 1)]
    start = index = 0
    while index < len(text):
        char = text[index]
        if char == "(":
            index = matching(text, index, "()")
        elif char == "}":
            start = index + 1
            yield from (closed for closed in [scopes.pop()] if closed.name)
        elif char in ";{":
            head = scopes[-1].after_labels(text[start:index])
            line = text.count("\n", 0, index - len(head)) + 1
            found = head_of_function(head)
            kind = kind_of(head, char, found)
            start = start if kind == "braces" else index + 1
            if kind == "scope":
                scopes.append(class_of(head, line))
            elif char == "{":
                index = matching(text, index, "{}")
                start = start if kind == "braces" else index + 1
            if found and kind in ("declaration", "function"):
                lines = text.count("\n", 0, index) + 2 - line if kind == "function" else 0
                scopes[-1].declare(head, found[0])
                yield Function(found[0], line, lines, found[1])
        index += 1


def class_in_python(node: ast.ClassDef) -> Class:
    """Returns a Python class; a property and its setter count as one method."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {each.name for each in node.body if isinstance(each, functions)}
    found = Class(node.name, node.lineno)
    for name in names:
        if not (name.startswith("__") and name.endswith("__")):
            found.add(not name.startswith("_"))
    return found


def scan_python(text: str) -> Iterator[Function | Class]:
    """Yields functions and classes of a Python source; self and cls are no parameters."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield class_in_python(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(1 for name in names if name.arg not in ("self", "cls"))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(node.name, node.lineno, lines, count)


def check_file(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields (key for the exceptions file, message) for everything too long in one file."""
    lines = text.count("\n")
    limit = MAX_PUBLIC_HEADER_LINES if path.startswith("include/") else MAX_FILE_LINES
    if lines > limit:
        yield path, f"{path}: {lines} lines, at most {limit}"
    for found in scan_python(text) if path.endswith(".py") else scan_cpp(text):
        if isinstance(found, Class):
            measures = [
                (found.public, "public methods", MAX_PUBLIC_METHODS),
                (found.methods, "methods", MAX_METHODS),
            ]
        else:
            measures = [(found.lines, "lines", MAX_FUNCTION_LINES)]
            if AS_DEEPSPEED not in path:
                measures.append((found.parameters, "parameters", MAX_PARAMETERS))
        for count, what, most in measures:
            if count > most:
                message = f"{path}:{found.line}: {found.name} has {count} {what}, at most {most}"
                yield f"{path}:{found.name}", message


def sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields our source files."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".h", ".cpp", ".cu", ".py"):
                yield file


def read_exceptions(lines: Iterable[str]) -> tuple[int, set[str]]:
    """Returns (max, keys) of the exceptions file. Raises ValueError for a missing reason."""
    entries = [line.split(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    if not entries or entries[0][0] != "max" or any(len(entry) < 2 for entry in entries):
        raise ValueError("size_exceptions.txt: `max N`, then lines `path:name reason`")
    return int(entries[0][1]), {entry[0] for entry in entries[1:]}


def check(root: pathlib.Path) -> list[str]:
    """Returns all problems of a tree, including those of the exceptions file."""
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
template <class T>
class API Outer final : public std::vector<T>, private S {
  enum class Kind { kOne, kTwo };
  void hidden() { if (a) { return; } }

 public:
  explicit Outer(int a = 0) : a_(a) {}
  ~Outer() override;

 public:
  struct Inner {
    bool counted_alone() const { return true; }
    std::function<void(int)> no_method;
    friend void nor_this(Inner& inner);
   private:
    void but_this();
  };
  std::function<void(int, int)> after_a_type_with_brackets(int a);
  operator bool() const { return true; }
  template <class Work>
  static void with(const Work& work) { work(); }

 protected:
  virtual int also_hidden() const = 0;
  std::vector<int> member_{1, 2};
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
    ("hidden", 1, 0),
    ("Outer", 1, 1),
    ("~Outer", 0, 0),
    ("counted_alone", 1, 0),
    ("nor_this", 0, 1),
    ("but_this", 0, 0),
    ("after_a_type_with_brackets", 0, 1),
    ("bool", 1, 0),
    ("with", 2, 1),
    ("also_hidden", 0, 0),
    ("TEST", 3, 2),
    ("last", 2, 0),
]
# Name, methods, public methods.
EXPECTED_CLASSES = [("S", 1, 1), ("Inner", 2, 1), ("Outer", 4, 2)]
PYTHON_SAMPLE = """
class P:
    def __init__(self): self.a = lambda: 1
    @property
    def value(self): return 1
    @value.setter
    def value(self, value): pass
    async def later(self):
        def inner(): pass
    def _hidden(self): pass
    class Inner:
        def alone(self): pass
def outside(): pass
"""
EXPECTED_PYTHON = [("P", 3, 2), ("Inner", 1, 1)]


def classes(found: Iterable[Function | Class]) -> list[tuple[str, int, int]]:
    """Returns (name, methods, public methods) of the classes among `found`."""
    return [(one.name, one.methods, one.public) for one in found if isinstance(one, Class)]


def limits_hold() -> bool:
    """Whether a class with the allowed number of methods passes, and one more does not."""

    def refused(count: int, access: str) -> bool:
        body = "".join(f"void f{i}();" for i in range(count))
        return any(check_file("src/a.h", f"class A {{ {access}: {body} }};"))

    return [
        refused(MAX_PUBLIC_METHODS, "public"),
        refused(MAX_PUBLIC_METHODS + 1, "public"),
        refused(MAX_METHODS, "private"),
        refused(MAX_METHODS + 1, "private"),
    ] == [False, True, False, True]


def self_test() -> int:
    """Checks the scanners on samples of awkward code."""
    measured = [f for f in scan_cpp(SAMPLE) if isinstance(f, Function) and f.name != "operator=="]
    comparisons = [
        ([(f.name, f.lines, f.parameters) for f in measured], EXPECTED),
        (classes(scan_cpp(SAMPLE)), EXPECTED_CLASSES),
        (classes(scan_python(PYTHON_SAMPLE)), EXPECTED_PYTHON),
    ]
    wrong = [(got, expected) for got, expected in comparisons if got != expected]
    for got, expected in wrong:
        print(f"self-test: expected {expected}\n           got      {got}")
    if wrong or not limits_hold():
        print("self-test: failed")
        return 1
    num_classes = len(EXPECTED_CLASSES) + len(EXPECTED_PYTHON)
    print(f"self-test: {len(EXPECTED)} functions, {num_classes} classes of the samples right")
    return 0


def main() -> int:
    """Prints what is too long in the tree this file is in (or in --root)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parents[1])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument(
        "--list",
        action="store_true",
        help="every function: lines, parameters; every class: methods, public",
    )
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if args.list:
        for file in sources(args.root):
            scan = scan_python if file.suffix == ".py" else scan_cpp
            for found in scan(file.read_text(encoding="utf-8")):
                where = f"{file.relative_to(args.root)}:{found.line}"
                if isinstance(found, Class):
                    print(f"{found.methods:4} {found.public:2} {where} class {found.name}")
                else:
                    print(f"{found.lines:4} {found.parameters:2} {where} {found.name}")
        return 0
    problems = check(args.root)
    print("\n".join(problems) or "size: no function, class, file or parameter list too long")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
