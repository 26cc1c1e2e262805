"""How the ranks of a case exchange: half of all cases through shared memory, half over gloo."""

from __future__ import annotations

import zlib


def of_case(name: object) -> str:
    """`comm.backend` of the case with this name, the same in every run."""
    return ("auto", "gloo")[zlib.crc32(str(name).encode()) % 2]
