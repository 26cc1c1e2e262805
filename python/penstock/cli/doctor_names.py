"""penstock doctor --deepspeed: finds names of DeepSpeed that Python files use but Penstock's
package lacks. It imports nothing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator

from penstock import deepspeed_names

HERE, RAISES, MISSING = "works", "raises when used", "missing"
_DYNAMIC = "_table.attributes"  # with a second argument it adds the names of torch.distributed


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What happens with a name, and why: it works, it raises when it is used, or it is missing."""

    state: str
    why: str = ""


@dataclasses.dataclass
class _File:
    """The names that a module of Penstock's package binds."""

    bound: dict[str, Verdict | tuple[str, str]]  # a tuple: module and name of the source
    stars: list[str]  # modules of which all names are imported
    open_ended: bool  # whether this module also has the names of torch.distributed
    texts: dict[str, str]  # name of a constant -> its text


def _path_of(module: str) -> pathlib.Path | None:
    base = deepspeed_names.FOLDER.joinpath(*module.split("."))
    found = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in found if path.is_file()), None)


def _origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Returns the full name of the module that `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


@functools.cache
def _file(module: str) -> _File | None:
    """Reads a module of the package; None if it has no file."""
    path = _path_of(module)
    if path is None:
        return None
    made = _File({}, [], False, {})
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, path.name == "__init__.py")
            made.stars += [origin for one in node.names if one.name == "*"]
            made.bound |= {one.asname or one.name: (origin, one.name) for one in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.bound[node.name] = _judged(node, f"{module}.{node.name}")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            text = ast.unparse(node.value) if node.value else ""
            made.open_ended |= text.startswith(_DYNAMIC) and "," in text
            for one in (x for target in targets for x in ast.walk(target)):
                if isinstance(one, ast.Name):
                    made.bound[one.id] = _assigned(node.value, f"{module}.{one.id}", made.texts)
    return made


def _assigned(value: ast.expr | None, path: str, texts: dict[str, str]) -> Verdict:
    """Judges what a module assigns to a name. `texts` collects its constants."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("_missing_name."):
        why = ast.unparse(value.args[1])
        known = texts.get(why) or {"_missing_name.TENSOR": deepspeed_names.TENSOR}.get(why)
        if isinstance(value.args[1], ast.Constant):
            known = str(value.args[1].value)
        return Verdict(RAISES, known or deepspeed_names.instead(path))
    if isinstance(value, ast.Constant):
        texts[path.rpartition(".")[2]] = str(value.value)
    return Verdict(HERE)


def _judged(node: ast.FunctionDef | ast.ClassDef, path: str) -> Verdict:
    """Returns the verdict on a definition. A function that only raises does not work."""
    said = ast.get_docstring(node)
    body = node.body[1:] if said else node.body
    if isinstance(node, ast.FunctionDef) and body and isinstance(body[0], ast.Raise):
        return Verdict(RAISES, said or deepspeed_names.instead(path))
    return Verdict(HERE)


@functools.cache
def _torch_distributed() -> str:
    """Returns the source of torch.distributed, without an import of torch; "" without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    folder = pathlib.Path(spec.submodule_search_locations[0], "distributed")
    files = (folder / "__init__.py", folder / "distributed_c10d.py")
    return "".join(path.read_text(encoding="utf-8") for path in files if path.is_file())


def is_module(path: str) -> bool:
    """Whether `import path` succeeds."""
    return _path_of(path) is not None or path in deepspeed_names.table()


def _by_file(module: str, name: str) -> Verdict | None:
    """Returns what the file of a module says about a name; None if the file does not have it."""
    file = _file(module)
    if file is None:
        return None
    found = file.bound.get(name)
    if isinstance(found, tuple):
        return verdict(*found)
    if found is not None:
        return found
    for star in file.stars:
        other = verdict(star, name)
        if other.state != MISSING:
            return other
    beside = file.open_ended and re.search(rf"\b{name}\b", _torch_distributed())
    return Verdict(HERE) if beside else None


def verdict(module: str, name: str) -> Verdict:
    """Returns what happens with a name of a module of DeepSpeed."""
    if is_module(f"{module}.{name}") or name.startswith("__") or not module.startswith("deepspeed"):
        return Verdict(HERE)
    found = _by_file(module, name)
    if found is not None:
        return found
    moved = deepspeed_names.elsewhere(module, name)
    if moved is not None:
        return verdict(*moved)
    line = deepspeed_names.table().get(module, {})
    if any(name in line.get(kind, ()) for kind in deepspeed_names.MADE):
        return Verdict(HERE)
    if name in deepspeed_names.defined(module):
        return Verdict(RAISES, deepspeed_names.instead(f"{module}.{name}"))
    origin = deepspeed_names.source(module, name)
    if origin is not None:
        return verdict(*origin)
    file = _file(module)
    return Verdict(
        MISSING, deepspeed_names.no_such_name(module, name, set(file.bound) if file else set())
    )


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """A place in a file that uses a name."""

    file: str
    line: int
    path: str


def uses(path: pathlib.Path, text: str) -> Iterator[tuple[Use, Verdict]]:
    """Yields the names of DeepSpeed that a file imports, and chains of attributes that begin with
    such a name. Raises SyntaxError if the file is not Python."""
    tree = ast.parse(text, str(path))
    known: dict[str, str] = {}  # name in the file -> full name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] != "deepspeed":
                    continue
                known[one.asname or "deepspeed"] = one.name if one.asname else "deepspeed"
                yield Use(str(path), node.lineno, one.name), _of_path(one.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = (node.module or "").split(".")
            if parts[0] != "deepspeed":
                continue
            for one in node.names:
                full = [*parts, *([] if one.name == "*" else [one.name])]
                known[one.asname or one.name] = ".".join(full)
                yield Use(str(path), node.lineno, ".".join(full)), _of_path(full)
    for node, chain in _chains(tree):
        if chain[0] in known:
            full = [*known[chain[0]].split("."), *chain[1:]]
            last = _end(full)
            yield Use(str(path), node.lineno, ".".join(full[:last])), _of_path(full[:last])


def _chains(tree: ast.AST) -> Iterator[tuple[ast.Attribute, list[str]]]:
    """Yields the longest chains of attributes of a name: a.b.c."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        names, at = [node.attr], node.value
        while isinstance(at, ast.Attribute):
            inner.add(id(at))
            names, at = [at.attr, *names], at.value
        if isinstance(at, ast.Name):
            yield node, [at.id, *names]


def _end(parts: list[str]) -> int:
    """Returns how many parts name modules, plus one if the next part is a name in a module."""
    ends = range(1, len(parts))
    return next((end + 1 for end in ends if not is_module(".".join(parts[: end + 1]))), len(parts))


def _of_path(parts: list[str]) -> Verdict:
    module, name = ".".join(parts[:-1]), parts[-1]
    if not module or is_module(".".join(parts)):
        return Verdict(HERE)
    if not is_module(module):
        return _of_path(parts[:-1])
    return verdict(module, name)


def report(folder: str) -> int:
    """Prints the names in a folder, or file, that do not work. Returns 1 if some are missing.

    Raises ValueError if there is no Python file.
    """
    base = pathlib.Path(folder)
    paths = sorted(base.rglob("*.py")) if base.is_dir() else [base] if base.is_file() else []
    if not paths:
        raise ValueError(f"[cli::doctor] {folder} has no Python file: give a folder of scripts")
    found: dict[Use, Verdict] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if "deepspeed" not in text:
            continue
        try:
            found.update(uses(path, text))
        except (SyntaxError, ValueError, RecursionError) as error:
            print(
                f"penstock: {path} is left out, because it is not Python: {error}", file=sys.stderr
            )
    for use, said in sorted(found.items(), key=lambda one: one[0]):
        if said.state != HERE:
            print(f"{use.file}:{use.line}: {use.path} {said.state}: {said.why}")
    count = {
        state: len({use.path for use, said in found.items() if said.state == state})
        for state in (HERE, RAISES, MISSING)
    }
    print(f"{len(paths)} files, names of deepspeed: {count[HERE]} work, {count[RAISES]} raise when "
          f"used, {count[MISSING]} are missing")  # fmt: skip
    return 1 if count[MISSING] else 0
