"""penstock inspect: lists the contents of a checkpoint and verifies its checksums."""

from __future__ import annotations

import argparse
import collections
import json
import math
import pathlib
import time
from typing import Any

from penstock._native import _penstock

_MANIFEST = "checkpoint.json"
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_MOST_NAME = 4096  # bytes of `latest` that are read; a name is shorter
_MOST_SLICES = 3  # slices shown in one line


def _size(tensor: dict[str, Any]) -> int:
    return int(math.prod(tensor["shape"])) * _BYTES.get(tensor["dtype"], 1)


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _manifest(folder: pathlib.Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return read


def _look(folder: pathlib.Path, quick: bool, tensors: bool) -> tuple[list[str], str]:
    """Reads the manifest and, unless `quick`, every byte.

    Returns the lines about the checkpoint, and "whole", "not read" or the damage. The manifest is
    printed only if its checksum is right.
    """
    lines = [f"{folder}"]
    try:
        reader = _penstock.CheckpointReader(str(folder))
        lines = _summary(folder) + (_table(folder) if tensors else [])
        if not quick:
            reader.verify()
    except RuntimeError as error:
        return lines, str(error)
    except (KeyError, TypeError, ValueError) as error:  # written by another program
        return lines, f"{folder / _MANIFEST}: {error!r}"
    return lines, "not read" if quick else "whole"


def _latest(path: pathlib.Path) -> tuple[str, bool]:
    """Returns the line about the file `latest` ("": there is none), and whether it is damaged."""
    latest = path / "latest"
    if not latest.exists():
        return "", False
    try:
        with latest.open("rb") as file:
            named = file.read(_MOST_NAME).decode(errors="backslashreplace").strip()
        there = "\0" not in named and (path / named / _MANIFEST).is_file()
    except OSError as error:
        return f"latest: {error}", True
    return f"latest: {named}" + ("" if there else " (there is no such checkpoint)"), not there


def _summary(folder: pathlib.Path) -> list[str]:
    manifest = _manifest(folder)
    about, state = manifest["about"], manifest["state"]
    roles: dict[str, list[int]] = collections.defaultdict(list)
    for tensor in manifest["tensors"]:
        roles[tensor["role"]].append(_size(tensor))
    lines = [
        f"{folder}",
        f"  step {state['steps']}, saved by {manifest['world']} rank(s), strategy "
        f"{about['strategy']}, Penstock {about['penstock']}, torch {about['torch']}",
    ]
    for role, sizes in sorted(roles.items()):
        lines.append(f"  {role:<16}{len(sizes):>6} tensors  {_human(sum(sizes))}")
    files = manifest["files"]
    lines.append(f"  {len(files)} file(s), {_human(sum(file['bytes'] for file in files))}")
    return lines


def _table(folder: pathlib.Path) -> list[str]:
    rows = [("tensor", "dtype", "shape", "bytes", "slices")]
    for tensor in _manifest(folder)["tensors"]:
        rank = f"@rank{tensor['rank']}" if "rank" in tensor else ""
        shown = [f"[{begin}:{end}] file {file}" for begin, end, file, _ in tensor["slices"]]
        more = f" and {len(shown) - _MOST_SLICES} more" if len(shown) > _MOST_SLICES else ""
        rows.append(
            (
                f"{tensor['role']}/{tensor['name']}{rank}",
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "1",
                _human(_size(tensor)),
                ", ".join(shown[:_MOST_SLICES]) + more,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def _checkpoints(path: pathlib.Path) -> list[pathlib.Path]:
    if (path / _MANIFEST).is_file():
        return [path]
    found = [p.parent for p in path.glob(f"*/{_MANIFEST}") if not p.parent.name.startswith(".")]
    if not found:
        raise ValueError(f"[inspect] there is no checkpoint in {path}")
    return sorted(found, key=lambda one: (one / _MANIFEST).stat().st_mtime)


def _inspect(args: argparse.Namespace) -> int:
    path = pathlib.Path(args.checkpoint)
    damaged = 0
    for folder in _checkpoints(path):
        begin = time.monotonic()
        lines, health = _look(folder, args.quick, args.tensors)
        damaged += health not in ("whole", "not read")
        took = f" ({time.monotonic() - begin:.2f} s)" if health == "whole" else ""
        print("\n".join([*lines, f"  health: {health}{took}"]))
    line, wrong = _latest(path)
    if line:
        print(line)
    return 1 if damaged or wrong else 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    inspect = commands.add_parser("inspect", help=summary)
    inspect.add_argument(
        "checkpoint", help="folder of a checkpoint, or a folder of several checkpoints"
    )
    inspect.add_argument("--tensors", action="store_true", help="print a line for each tensor")
    inspect.add_argument("--quick", action="store_true", help="do not read and verify the values")
    inspect.set_defaults(command=_inspect)
