"""The calibration file: the speed of one rank on a machine, as measured by `penstock bench`.

It is one JSON object with the fields of `_penstock.Machine`. A field that is null or missing was
not measured; a reader then keeps the default value. "about" records the conditions of the
measurement.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from penstock._native import _penstock

ABOUT = "about"
OVERLAP = "overlap"
# Field -> its meaning.
FIELDS = {
    "flops": "FLOP/s of forward and backward",
    "local": "bytes/s sent to ranks of the same node",
    "node": "bytes/s sent to other nodes",
    "device_host": "bytes/s copied between device and host memory",
    "host_disk": "bytes/s read from and written to disk",
    "host_memory": "bytes/s of host memory, for an optimizer on the CPU",
    "device_memory": "bytes/s of device memory, for an optimizer on the device",
    OVERLAP: "share of the time of copies and exchanges that does not slow down compute",
    "one_row": "bytes/s of weights, in products with one row",
    "rows_16": "FLOP/s of products with 16 rows",
    "attention": "bytes/s of keys and values of 8 heads, to which one token attends",
}


def load(path: str | pathlib.Path) -> Any:
    """Reads a file into a `_penstock.Machine`. Fields that were not measured keep their defaults.

    Raises ConfigError, with the file and the fault, if the file cannot be read.
    """
    return _penstock.read_machine(str(path), _penstock.Machine())


def is_of_cpu(path: str | pathlib.Path) -> bool:
    """Returns whether the ranks of a file that load() takes compute on a CPU."""
    about = json.loads(pathlib.Path(path).read_text(encoding="utf-8")).get(ABOUT)
    return isinstance(about, dict) and about.get("device") == "cpu"
