"""Packs built binaries into one file, for a machine with the same torch and Python on which a build
would take long, or fail."""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import tarfile

import source_tree
from stages import Check, Outcome

# What the binaries depend on. The package's Python files are always those of the tree.
COMPILED = ("CMakeLists.txt", "cmake", "include", "src", "python/src", "tests/device/simulated")
COMPILED += ("benchmarks/cpu_adam_kernels.cpp", "benchmarks/disk_io.cpp")
LABEL = "prebuilt.json"
NATIVE = ("site/penstock/*.so", "tree/build/release/benchmarks/*.so")
NATIVE_SIM = ("tree/build/release/tests/device/*.so",)


def label(check: Check, torch: str) -> dict[str, str]:
    """Returns what must be equal for the binaries to be usable."""
    python = ".".join(platform.python_version_tuple()[:2])
    digest = source_tree.digest(check.tree, COMPILED)
    return {"torch": torch, "python": python, "machine": platform.machine(), "sources": digest}


def pack(check: Check, torch: str, file: pathlib.Path) -> None:
    """Packs what was built here. Raises FileNotFoundError if nothing was."""
    names = sorted(path for pattern in NATIVE + NATIVE_SIM for path in check.state.glob(pattern))
    if not any(path.name.startswith("_penstock") for path in names):
        raise FileNotFoundError("nothing has been built yet, so there is nothing to pack")
    (check.state / LABEL).write_text(json.dumps(label(check, torch)), encoding="utf-8")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for path in [check.state / LABEL, *names]:
            archive.add(path, path.relative_to(check.state))


def unpack(check: Check, torch: str, file: pathlib.Path) -> Outcome:
    """Unpacks binaries into the build folder; fails if sources, torch or Python differ."""
    with tarfile.open(file) as archive:
        archive.extractall(check.state, filter="data")
    found = json.loads((check.state / LABEL).read_text(encoding="utf-8"))
    wanted = label(check, torch)
    apart = [
        f"{key} {found[key]}, here {wanted[key]}" for key in wanted if found[key] != wanted[key]
    ]
    if apart:
        return Outcome("failed", tail=f"{file} is of {'; '.join(apart)}")
    package = check.site / "penstock"
    shutil.copytree(check.tree / "python" / "penstock", package, dirs_exist_ok=True)
    return Outcome("done", dict(found))
