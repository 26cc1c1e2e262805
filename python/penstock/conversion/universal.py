"""Makes a checkpoint folder that loads under any layout, as DeepSpeed's ds_to_universal does."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile

from penstock._native import ConfigError
from penstock.conversion.convert import convert
from penstock.conversion.options import Options, Say

_MANIFEST = "checkpoint.json"


def is_ours(folder: pathlib.Path) -> bool:
    """Whether the folder is one checkpoint of Penstock."""
    return (folder / _MANIFEST).is_file()


def is_newer(made: pathlib.Path, source: pathlib.Path) -> bool:
    """Returns whether the folder is a Penstock checkpoint, newer than each file of `source`."""
    if not is_ours(made):
        return False
    files = [one for one in source.rglob("*") if one.is_file()]
    last = max((one.stat().st_mtime_ns for one in files), default=0)
    return (made / _MANIFEST).stat().st_mtime_ns > last


def make(source: pathlib.Path, out: pathlib.Path, say: Say = lambda line: None) -> None:
    """Makes the folder `out` from one checkpoint. The folder appears when it is complete.

    A checkpoint of Penstock already loads under any layout, so its files are linked (copied if
    `out` is on another file system). A checkpoint of DeepSpeed is converted
    (docs/checkpoints.md).

    Raises:
        ConfigError: `out` exists and is not an earlier result, or the source cannot be converted.
        RuntimeFault: a file is damaged or missing.
    """
    if out.exists() and not is_ours(out):
        raise ConfigError(f'[convert::universal] "{out}" exists already: choose another folder')
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if is_ours(source):
            made = draft / "linked"
            shutil.copytree(source, made, copy_function=_link)
        else:
            made = pathlib.Path(convert(source, draft / "made", Options(say=say)))
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
