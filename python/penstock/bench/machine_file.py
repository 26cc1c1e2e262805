"""A calibration file: what a rank reaches on a machine, measured (`penstock bench`).

JSON, one object with the fields of `_penstock.Machine` by name. A field that is null or left out
was not measured: whoever reads the file keeps what is assumed of it. "about" says how they were
measured.
"""

from __future__ import annotations

import pathlib
from typing import Any

from penstock._native import _penstock

ABOUT = "about"
OVERLAP = "overlap"
# Field -> what it is.
FIELDS = {
    "flops": "FLOP/s of forward and backward",
    "local": "bytes/s sent to ranks of the same node",
    "node": "bytes/s sent to other nodes",
    "device_host": "bytes/s copied between device and host memory",
    "host_disk": "bytes/s read from and written to disk",
    "host_memory": "bytes/s of host memory, for an optimizer on the CPU",
    "device_memory": "bytes/s of device memory, for one on the device",
    OVERLAP: "share of the seconds of copies and exchanges that slow down no compute",
}


def load(path: str | pathlib.Path) -> Any:
    """A `_penstock.Machine` with what the file knows, the rest as it is by default. Raises
    ConfigError, which names the file and its fault."""
    return _penstock.read_machine(str(path), _penstock.Machine())
