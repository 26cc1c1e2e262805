"""Fails if an include or import points to a higher or neighbouring layer, or forms a cycle.

The layers are those of docs/design.md, section "Layers". --self-test plants each kind of mistake in
a temporary tree and checks that it is found.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping

# Folder -> our layers whose headers it may include, besides its own.
PURE = ("src/base", "src/place", "src/plan")
BESIDE = ("src/base", "src/trace", "src/place", "src/device")
FIVES = ("src/mem", "src/comm", "src/optim")
CORE = (*PURE, "src/trace", "src/device", *FIVES, "src/activations", "src/exec")
LAYERS: dict[str, tuple[str, ...]] = {
    "src/base": (),
    "src/trace": ("src/base",),
    "src/place": ("src/base",),
    "src/plan": ("src/base", "src/place"),
    "src/simd": ("src/base", "src/place"),
    "src/device": ("src/base", "src/trace", "src/place", "src/simd"),
    "src/mem": BESIDE,
    "src/comm": BESIDE,
    "src/optim": ("src/base", "src/place", "src/device", "src/simd"),
    "src/activations": (*BESIDE, "src/mem"),
    "src/exec": (*PURE, "src/trace", "src/device", *FIVES, "src/activations"),
    "src/parallel": CORE,
    "src/tiles": CORE,
    "src/ckpt": CORE,
    "src/engine": (*CORE, "src/parallel", "src/tiles", "src/ckpt"),
    "python/src": (*CORE, "src/parallel", "src/tiles", "src/engine", "src/ckpt"),
    "include/penstock": (),
    "examples/skeleton": PURE,
    "examples/cpp": (),
    "tests": (*CORE, "src/tiles", "src/engine", "src/ckpt"),
    "benchmarks": (*CORE, "src/tiles", "src/engine", "src/ckpt"),
}
# The height of each layer; below, the lowest one that may include a public header (by default
# the engine's).
POSITION = {
    "src/base": 1,
    "src/trace": 1,
    "src/place": 2,
    "src/plan": 3,
    "src/simd": 3,
    "src/device": 4,
    "src/activations": 5,
    "src/exec": 6,
    "src/parallel": 7,
    "src/tiles": 7,
    "src/ckpt": 7,
}
POSITION |= dict.fromkeys(FIVES, 5)
PUBLIC_FROM = {"error.h": 1, "export.h": 1, "axis.h": 2, "cut.h": 2}
PUBLIC_FROM |= {"group.h": 5}
PUBLIC_FROM |= dict.fromkeys(("config.h", "deepspeed_config.h", "optimizer_kinds.h", "plan.h"), 3)
PUBLIC_FROM |= dict.fromkeys(("init.h", "core.h", "checkpoint_files.h"), 7)
ENGINE = 8

NO_TORCH = (*PURE, "src/trace", "src/simd", "examples/skeleton")
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")
WHOLE_TORCH = re.compile(r"^(torch/torch|torch/all|ATen/ATen)\.h$")
WHOLE_TORCH_IN = ("include/penstock", "src/engine", "python/src", "examples/cpp", "tests")
PYTHON = re.compile(
    r"^(pybind11/|Python\.h$|torch/(extension|python)\.h$"
    r"|torch/csrc/(utils/pybind\.h|utils/python_|Exceptions\.h|autograd/python_|DynamicTypes\.h))"
)
DEVICE = re.compile(r"^((c10|ATen)/(cuda|hip|xpu)/|cuda|hip/|nccl\.h)")
# Other libraries -> folders that may use them.
LIBRARIES = {
    "nlohmann/": ("src/plan", "src/engine", "src/ckpt", "python/src"),
    "xxhash.h": ("src/ckpt",),
    "hwy/": ("src/simd", "src/device", "src/optim", "benchmarks"),
    "gtest/": (),
    "gmock/": (),
}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
CPP_SUFFIXES = {".h", ".cpp"}

# The command line uses the rest of the front; the launcher is the only command outside it.
CLI, MAY_IMPORT_CLI = "penstock.cli", ("python/penstock/cli/", "python/penstock/__main__.py")
# This package is imported under another name, so it uses relative imports.
AS_DEEPSPEED = "python/penstock/as_deepspeed/"
Problems = list[str]


def layer_of(path: str) -> str | None:
    """Returns the layer of a file, or None if it is in no layer."""
    matches = [layer for layer in LAYERS if path.startswith(layer + "/")]
    return max(matches, key=len, default=None)


def resolve(target: str) -> str:
    """Returns the path from the root for an include as it is written."""
    return f"include/{target}" if target.startswith("penstock/") else target


def check_public(path: str, layer: str, header: str) -> str | None:
    """Returns why a file of `layer` may not include include/penstock/`header`, or None."""
    reach = POSITION.get(layer, ENGINE)
    if layer == "include/penstock":  # a header may not drag in what its own users may not see
        reach = PUBLIC_FROM.get(path.rpartition("/")[2], ENGINE)
    if reach >= PUBLIC_FROM.get(header, ENGINE):
        return None
    return "public header for higher layers only"


def check_ours(path: str, layer: str, target: str) -> str | None:
    """Returns why a file of `layer` may not include our file `target`, or None."""
    if target.startswith("include/penstock/"):
        return check_public(path, layer, target.rpartition("/")[2])
    to = layer_of(target)
    if to is None:
        return "full path from the root expected, in a known layer"
    if to != layer and to not in LAYERS[layer]:
        return f"{layer} may not include {to}"
    return None


def check_foreign(path: str, layer: str, target: str) -> str | None:
    """Returns why a file of `layer` may not include a header of a library, or None."""
    is_test = path.endswith("_test.cpp") or layer == "tests"
    if DEVICE.match(target):
        return "device headers belong in a device plugin"
    if PYTHON.match(target):
        if layer == "python/src" or path.startswith("tests/device/"):  # a test's own module
            return None
        return "only python/src may include Python headers"
    if TORCH.match(target):
        public = path.startswith("include/penstock/")
        if layer in NO_TORCH or (public and PUBLIC_FROM.get(path.rpartition("/")[2], ENGINE) <= 3):
            return "this layer must build without torch"
        if WHOLE_TORCH.match(target) and layer not in WHOLE_TORCH_IN and not is_test:
            return "whole-torch headers are for the fronts and tests; use per-op headers"
        return None
    for prefix, layers in LIBRARIES.items():
        if target.startswith(prefix):
            allowed = layer in layers or (is_test and prefix != "hwy/")
            return None if allowed else f"{layer} may not use {prefix.rstrip('/')}"
    return None


def is_ours(bracket: str, target: str) -> bool:
    """Whether an include is ours: quoted (except a library's header), or in the public folder."""
    if target.startswith(("penstock/", "src/", "python/", "tests/", "examples/", "benchmarks/")):
        return True
    return bracket == '"' and not target.startswith(tuple(LIBRARIES))


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns a cycle as a list of names, the first repeated at the end; empty if there is none."""
    done: set[str] = set()
    trail: list[str] = []

    def visit(node: str) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        trail.append(node)
        for target in sorted(graph.get(node, ())):
            if cycle := visit(target):
                return cycle
        trail.pop()
        done.add(node)
        return []

    for node in sorted(graph):
        if cycle := visit(node):
            return cycle
    return []


def check_cpp(root: pathlib.Path) -> Problems:
    """Checks every include of every layer, and include cycles."""
    problems: Problems = []
    graph: dict[str, set[str]] = {}
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root).as_posix()
        layer = layer_of(path)
        if file.suffix not in CPP_SUFFIXES or layer is None:
            continue
        text = file.read_text(encoding="utf-8")
        for match in INCLUDE.finditer(text):
            bracket, target = match.groups()
            if is_ours(bracket, target):
                target = resolve(target)
                graph.setdefault(path, set()).add(target)
                why = check_ours(path, layer, target)
            else:
                why = check_foreign(path, layer, target)
            if why:
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{path}:{line}: includes {target}: {why}")
    if cycle := find_cycle(graph):
        problems.append("include cycle: " + " -> ".join(cycle))
    return problems


def imports_of(tree: ast.Module) -> Iterable[tuple[int, str]]:
    """Yields (line, dotted name) of each import, in functions too; a.b for `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def absolute(module: str, is_package: bool, target: str) -> str:
    """Returns the absolute name of a relative import."""
    level = len(target) - len(target.lstrip("."))
    base = module.split(".")[: None if is_package and level == 1 else -(level - is_package)]
    return ".".join([*base, target.lstrip(".")])


def check_import(path: str, target: str) -> str | None:
    """Returns which part of the front may not import `target`, or None if the file may."""
    if target.split(".")[0] in ("tests", "tools", "examples", "benchmarks"):
        return "the front"
    if path.startswith(AS_DEEPSPEED):
        return None
    if "as_deepspeed" in target:
        return "the front"
    is_cli = path.startswith(MAY_IMPORT_CLI)
    return "code outside the commands" if target.startswith(CLI) and not is_cli else None


def check_python(root: pathlib.Path) -> Problems:
    """Checks that the front imports nothing from tests, tools, examples or its command line, and
    has no import cycle."""
    problems: Problems = []
    package = root / "python" / "penstock"
    names: dict[str, pathlib.Path] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        path = file.relative_to(root).as_posix()
        for line, target in imports_of(ast.parse(file.read_text(encoding="utf-8"), path)):
            if target.startswith(".") and AS_DEEPSPEED in path:
                target = absolute(name, file.name == "__init__.py", target)
            elif target.startswith("."):
                problems.append(f"{path}:{line}: relative import; write penstock.x")
            if why := check_import(path, target):
                problems.append(f"{path}:{line}: {why} may not import {target}")
            module = target if target in names else target.rpartition(".")[0]
            # If a submodule imports a name from its own package, the package defines the name.
            if module in names and module != name:
                graph.setdefault(name, set()).add(module)
    if cycle := find_cycle(graph):
        problems.append("import cycle: " + " -> ".join(cycle))
    return problems


def check(root: pathlib.Path) -> Problems:
    """Returns all problems of a tree."""
    return check_cpp(root) + check_python(root)


PLANTED = {
    "right": {"src/place/a.cpp": '#include "src/plan/plan.h"\n'},
    "sideways": {"src/mem/a.cpp": '#include "src/comm/group.h"\n'},
    "skips its list": {"src/optim/a.cpp": '#include "src/plan/plan.h"\n'},
    "ckpt to tiles": {"src/ckpt/a.cpp": '#include "src/tiles/weights.h"\n'},
    "simd in place": {"src/place/a.cpp": "#include <hwy/highway.h>\n"},
    "simd below": {"src/plan/a.cpp": '#include "src/simd/dtypes.h"\n'},
    "tiles to engine": {"src/tiles/a.cpp": '#include "src/engine/step/core_state.h"\n'},
    "tiles to the front": {"src/tiles/a.cpp": '#include "penstock/engine.h"\n'},
    "exec to tiles": {"src/exec/a.cpp": '#include "src/tiles/tiling.h"\n'},
    "torch below": {"src/plan/a.cpp": "#include <c10/util/Exception.h>\n"},
    "python in core": {"src/exec/a.cpp": "#include <torch/csrc/utils/pybind.h>\n"},
    "device in core": {"src/mem/a.cpp": "#include <c10/cuda/CUDAStream.h>\n"},
    "private in public": {"include/penstock/a.h": '#include "src/base/text.h"\n'},
    "public too early": {"src/exec/a.cpp": '#include "penstock/engine.h"\n'},
    "config too early": {"src/place/a.cpp": '#include "penstock/config.h"\n'},
    "config with torch": {"include/penstock/config.h": "#include <ATen/core/Tensor.h>\n"},
    "relative": {"src/plan/a.cpp": '#include "plan.h"\n'},
    "json in place": {"src/place/a.cpp": "#include <nlohmann/json.hpp>\n"},
    "include cycle": {
        "src/plan/a.h": '#include "src/plan/b.h"\n',
        "src/plan/b.h": '#include "src/plan/a.h"\n',
    },
    "import cycle": {
        "python/penstock/a.py": "from penstock import b\n",
        "python/penstock/b.py": "import penstock.a\n",
    },
    "cli in front": {"python/penstock/front/a.py": "from penstock.cli import terminal\n"},
    "tests in front": {"python/penstock/a.py": "import tests.case\n"},
}
CLEAN = {
    "include/penstock/config.h": '#include <string>\n\n#include "penstock/error.h"\n',
    "include/penstock/engine.h": '#include <torch/nn/module.h>\n#include "penstock/config.h"\n',
    "src/base/a.cpp": '#include "penstock/error.h"\n#include <unistd.h>\n',
    "src/plan/a.cpp": '#include "penstock/config.h"\n#include <nlohmann/json.hpp>\n',
    "src/simd/a.h": '#include <hwy/highway.h>\n#include "src/place/placement.h"\n',
    "src/optim/a.cpp": '#include "src/simd/a.h"\n#include <ATen/Parallel.h>\n',
    "src/tiles/a.cpp": '#include "penstock/core.h"\n#include "src/mem/arena.h"\n',
    "src/engine/a.cpp": '#include "src/exec/executor.h"\n#include "penstock/engine.h"\n',
    "src/exec/a_test.cpp": "#include <gtest/gtest.h>\n#include <torch/torch.h>\n",
    "examples/cpp/a.cpp": "#include <penstock/engine.h>\n#include <torch/torch.h>\n",
    "python/penstock/__init__.py": "from penstock import a\n",
    "python/penstock/a.py": "import json\n",
}


def self_test() -> int:
    """Plants each mistake; returns 1 if one is not found, or if a clean tree has problems."""
    failures = 0
    for name, files in {"clean": CLEAN, **PLANTED}.items():
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                file = pathlib.Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            problems = check(pathlib.Path(folder))
        if bool(problems) != (name != "clean"):
            failures += 1
            print(f"self-test: {name}: found {problems}")
    print(f"self-test: {len(PLANTED)} planted mistakes and a clean tree, {failures} wrong")
    return 1 if failures else 0


def main() -> int:
    """Prints the problems of the tree this file is in (or of --root)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parents[1])
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    problems = check(args.root)
    print("\n".join(problems) or "layers: every include and import points to a lower layer")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
