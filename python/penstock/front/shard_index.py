"""Reads the index of a folder of weights, such as `model.safetensors.index.json`."""

import json
import pathlib
from typing import Any

from penstock._native import RuntimeFault


def files_of(index: pathlib.Path, where: str) -> tuple[list[pathlib.Path], dict[str, str]]:
    """Returns the files that an index names, and the file name of each tensor.

    Args:
        index: the index that Hugging Face's libraries write beside shards of weights.
        where: the place that is named in errors: "convert::hf".

    Raises:
        RuntimeFault: if the file is not an index, or names a file outside its folder.
    """
    try:
        held: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): str(file) for name, file in held.items()}
        files = [index.parent / name for name in sorted(set(named.values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RuntimeFault(f'[{where}] "{index}" is not an index: {error!r}') from error
    for file in files:
        if file.parent != index.parent or file.name.startswith("."):
            raise RuntimeFault(
                f'[{where}] "{index}" names "{file.name}", which is outside its folder'
            )
    return files, named
