"""Which environment variables go along to other nodes, and files of variables."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping

# DeepSpeed's, gloo's beside NCCL's, and ours.
PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "GLOO", "PENSTOCK")
# Said by an option of `penstock run` on each node instead.
_NOT_CARRIED = ("PENSTOCK_RESUME",)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def read_env_file(path: str) -> dict[str, str]:
    """Variables of a file of NAME=VALUE lines; quotes around a value are dropped, nothing is
    expanded. Raises ValueError with file and line for any other line."""
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
                f"[launch::env_file] {path}:{number}: {line.strip()!r} is no variable; allowed are "
                f"NAME=VALUE, empty lines, and lines that start with #"
            )
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        variables[name.strip()] = value
    return variables


def default_env_files(environ: Mapping[str, str]) -> list[str]:
    """The `.deepspeed_env` files that are there, of the home and of the working directory.
    DS_ENV_FILE is another name for them, or one path."""
    name = environ.get("DS_ENV_FILE") or ".deepspeed_env"
    found = [os.path.join(folder, name) for folder in (os.path.expanduser("~"), os.getcwd())]
    return list(dict.fromkeys(path for path in found if os.path.isfile(path)))


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of this process that the other nodes get, by the prefixes of their names.
    PYTHONPATH begins with the working directory, where the nodes start."""
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIXES) and name not in _NOT_CARRIED and _NAME.match(name)
    }
    paths = [os.getcwd(), *filter(None, [environ.get("PYTHONPATH", "")])]
    return found | {"PYTHONPATH": ":".join(paths)}
