"""Chooses the environment variables that other nodes receive, and reads env files."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

# DeepSpeed's prefixes, plus gloo's and Penstock's.
PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "GLOO", "PENSTOCK")
# Each node gets its value from an option of `penstock run` instead.
_NOT_CARRIED = ("PENSTOCK_RESUME",)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def read_env_file(path: str) -> dict[str, str]:
    """Reads the variables in a file of NAME=VALUE lines.

    Quotes around a value are dropped; nothing is expanded. Raises ValueError if the file cannot be
    read, and with file and line number for any other kind of line.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"[launch::env_file] cannot read the env file {path}: {error}") from None
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not _NAME.match(name.strip()):
            raise ValueError(
                f"[launch::env_file] {path}:{number}: {line.strip()!r} sets no variable; allowed "
                f"are NAME=VALUE, empty lines, and lines that start with #"
            )
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        variables[name.strip()] = value
    return variables


def default_env_files(environ: Mapping[str, str]) -> list[str]:
    """Returns the existing `.deepspeed_env` files of the home and of the working directory.

    DS_ENV_FILE replaces that name, or is the path of one file.
    """
    name = environ.get("DS_ENV_FILE") or ".deepspeed_env"
    found = [os.path.join(folder, name) for folder in (os.path.expanduser("~"), os.getcwd())]
    return list(dict.fromkeys(path for path in found if os.path.isfile(path)))


def carried(environ: Mapping[str, str], prefixes: Sequence[str] = PREFIXES) -> dict[str, str]:
    """Returns the variables of this process that the other nodes receive, chosen by prefix.

    The working directory is put in front of PYTHONPATH, since the nodes start there.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(tuple(prefixes)) and name not in _NOT_CARRIED and _NAME.match(name)
    }
    paths = [os.getcwd(), *filter(None, [environ.get("PYTHONPATH", "")])]
    return found | {"PYTHONPATH": ":".join(paths)}
