"""Makes a copy of the source tree in which only changed sources change, and hashes parts of it.

If a tree is sent to this machine again, all of its files may have new times, and would be built
again. A checkout may also be read-only.
"""

from __future__ import annotations

import filecmp
import hashlib
import pathlib
import shutil
from collections.abc import Iterable, Iterator

LEFT_OUT = {"build", "dist", "shared", "__pycache__"}  # and what begins with a dot


def _files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files below `root`, except those of builds, tools and virtual environments."""
    for path in sorted(root.iterdir()):
        if path.name in LEFT_OUT or path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():
                yield from _files(path)
        elif path.suffix not in (".so", ".pyc"):
            yield path


def mirror(source: pathlib.Path, copy: pathlib.Path) -> None:
    """Makes `copy` hold the sources; files that are equal keep their times."""
    copy.mkdir(parents=True, exist_ok=True)
    names = {path.relative_to(source) for path in _files(source)}
    for old in list(_files(copy)):
        if old.relative_to(copy) not in names:
            old.unlink()
    for name in names:
        target = copy / name
        if target.exists() and filecmp.cmp(source / name, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
        shutil.copymode(source / name, target)


def digest(root: pathlib.Path, parts: Iterable[str]) -> str:
    """Returns a hash of the names and contents of these files and folders of `root`; missing ones
    are skipped."""
    total = hashlib.sha256()
    for part in parts:
        path = root / part
        found = _files(path) if path.is_dir() else [path] if path.exists() else []
        for file in found:
            total.update(str(file.relative_to(root)).encode() + b"\0")
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]
