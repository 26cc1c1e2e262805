"""Writes as_deepspeed/names.jsonl: the modules of DeepSpeed and their public names, one per line.

    PYTHONPATH=FOLDER DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python record_names.py FOLDER

FOLDER has an installed DeepSpeed. A line has the keys `module` and, if they are not empty:
    getters                 functions that read a key of a config dict: [key, default]
    defs, classes, others   names that the module defines: functions, classes, other objects
    values                  constants with their values
    enums, errors           enumerations with their values; exceptions with their base
    settings                classes of config sections: key -> [kind, default, other name]
    from                    module -> names that are imported from it; "*" for all
"""

from __future__ import annotations

import ast
import enum
import importlib
import json
import pathlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

OUT = pathlib.Path(__file__).parents[2] / "python/penstock/as_deepspeed/names.jsonl"
PLAIN = (str, int, float, bool, type(None))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also in `if`, `try` and `with`."""
    for one in body:
        yield one
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(one, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from statements(getattr(one, inner, []))


def is_plain(value: Any) -> bool:
    """Whether JSON can hold the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, str):  # a key, a file name; no text
        return len(value) < 80 and value.count(" ") < 3 and not value.startswith("/tmp")
    return type(value) in PLAIN


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit):  # noqa: BLE001 - a module for another device
        return types.ModuleType(name)


def defaults(cls: Any) -> dict[str, Any]:
    """Key of a pydantic model -> [kind, default, alias]; a section as a default is a dict."""
    made: dict[str, Any] = {}
    for key, field in cls.model_fields.items():
        value = field.get_default(call_default_factory=True)
        value = value.value if isinstance(value, enum.Enum) else value
        value = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        value = int(value) if isinstance(value, int) and type(value) is not bool else value
        value = value if is_plain(value) else None
        made[key] = [kind_of(field.annotation), value]
        made[key] += [field.alias] if field.alias not in (None, key) else []
    return made


def kind_of(annotation: Any) -> str:
    """A plain type, or the full name of one of DeepSpeed's classes, with "?" if None is allowed; ""
    for everything else."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    mark = "?" if type(None) in kinds else ""
    kinds = tuple(one for one in kinds if one is not type(None))
    if len(kinds) != 1 or not isinstance(kinds[0], type):
        return ""
    if kinds[0] in PLAIN:
        return kinds[0].__name__ + mark
    home = kinds[0].__module__
    return f"{home}.{kinds[0].__name__}{mark}" if home.startswith("deepspeed.") else ""


def public(cls: Any) -> dict[str, Any]:
    """What the body of a class binds; {} if it derives from another one."""
    if getattr(cls, "__bases__", ()) != (object,) or hasattr(cls, "__dataclass_fields__"):
        return {}
    return {key: value for key, value in vars(cls).items() if not key.startswith("_")}


def add_class(line: dict[str, Any], name: str, cls: Any) -> None:
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and is_plain([x.value for x in cls]):
        mixed = next((kind.__name__ for kind in (int, str) if issubclass(cls, kind)), "")
        line["enums"][name] = {"": mixed} | {n: x.value for n, x in cls.__members__.items()}
    elif isinstance(cls, type) and issubclass(cls, Exception):
        line["errors"][name] = next(
            base.__name__ for base in cls.__mro__[1:] if base.__module__ == "builtins"
        )
    elif hasattr(cls, "model_fields") and not cls.__module__.startswith("deepspeed.inference"):
        line["settings"][name] = defaults(cls)
    elif public(cls) and is_plain(public(cls)):
        line["enums"][name] = {"": "object"} | public(cls)
    else:
        line["classes"].append(name)


def add_import(line: dict[str, Any], name: str, is_package: bool, node: ast.ImportFrom) -> None:
    base = name.split(".") if is_package else name.split(".")[:-1]
    base = base[: len(base) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    if source.split(".")[0] != "deepspeed":
        return
    for one in node.names:
        made = one.asname or one.name
        if not made.startswith("_"):
            spelt = one.name if made == one.name else f"{made}={one.name}"
            line["from"].setdefault(source, []).append(spelt)


def describe(path: pathlib.Path, root: pathlib.Path) -> dict[str, Any]:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    live = imported(name)
    line: dict[str, Any] = {"module": name, "package": is_package, "defs": [], "classes": []}
    line |= {"others": [], "values": {}, "enums": {}, "errors": {}, "settings": {}, "getters": {}}
    line["from"] = {}
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ImportFrom):
            add_import(line, name, is_package, node)
        for one in bound(node):
            if not one.startswith("_") and one != "T":
                add(line, one, node, getattr(live, one, literal(node)))
    add_dynamic(line, live, [*getattr(live, "__all__", ()), *(vars(live) if is_package else ())])
    for key in ("defs", "classes", "others"):
        line[key] = sorted(set(line[key]))
    return {key: value for key, value in line.items() if value}


def knows(lines: dict[str, dict[str, Any]], module: str, name: str) -> bool:
    """Whether one of DeepSpeed's modules defines the name, or takes it from another one."""
    line = lines.get(module, {})
    if f"{module}.{name}" in lines:
        return True
    if any(name in line[key] for key in line if key not in ("module", "package", "from")):
        return True
    for origin, names in line.get("from", {}).items():
        other = next((one.split("=")[-1] for one in names if one.partition("=")[0] == name), "")
        if (other or "*" in names) and knows(lines, origin, other or name):
            return True
    return False


def add_dynamic(line: dict[str, Any], live: types.ModuleType, names: list[str]) -> None:
    """Adds the classes and functions among the names that a module binds by code of its own."""
    told = {one.partition("=")[0] for names in line["from"].values() for one in names}
    told |= {name for key in ("classes", "enums", "errors", "settings") for name in line[key]}
    told |= {*line["defs"]}
    for name in names:
        value = getattr(live, name, None)
        home = getattr(value, "__module__", None) or ""
        foreign = callable(value) and home.startswith("deepspeed.")
        if foreign and home != line["module"] and name not in told and name[0] != "_":
            if "*" not in line["from"].get(home, ()):
                line["from"].setdefault(home, []).append(name)


def bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    inner = [x for one in targets if one is not None for x in ast.walk(one)]
    return [x.id for x in inner if isinstance(x, ast.Name)]


def key_of(name: str, function: Any) -> str:
    """The key of a config dict that a function returns unchanged; "" if it does something else."""
    key, mark = name.removeprefix("get_"), [object()]
    try:
        same = function({key: mark}) is mark and is_plain(function({}))
    except Exception:  # noqa: BLE001 - it takes something else
        return ""
    return key if same else ""


def add(line: dict[str, Any], name: str, node: ast.stmt, value: Any) -> None:
    if isinstance(node, ast.ClassDef):
        add_class(line, name, value)
    elif isinstance(node, ast.FunctionDef):
        key = key_of(name, value) if [x.arg for x in node.args.args] == ["param_dict"] else ""
        if key:
            line["getters"][name] = [key, value({})]
        else:
            line["defs"].append(name)
    elif name.isupper() and is_plain(value):
        line["values"][name] = value
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        line["others"].append(name)


def literal(node: ast.stmt) -> Any:
    try:
        return ast.literal_eval(node.value) if isinstance(node, ast.Assign) else Ellipsis
    except ValueError:
        return Ellipsis


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    lines = [describe(path, root) for path in sorted(root.glob("deepspeed/**/*.py"))]
    known = {line["module"]: line for line in lines}
    for line in lines:  # without what a module took from torch and passes on
        for origin, names in list(line.get("from", {}).items()):
            kept = [one for one in names if one == "*" or knows(known, origin, one.split("=")[-1])]
            line["from"][origin] = kept
    OUT.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
