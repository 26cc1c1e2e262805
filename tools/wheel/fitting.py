"""Prints the wheel in dist/ that fits: built from these sources, for this Python and its torch.

Prints nothing if there is none. `make demo` installs it instead of building.
"""

from __future__ import annotations

import sys
import sysconfig

import backend


def main() -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = sysconfig.get_platform().rpartition("-")[2]
    pattern = f"penstock-*-{backend.build_tag()}-{python}-{python}-*{machine}.whl"
    found = sorted((backend.ROOT / "dist").glob(pattern))
    if found:
        print(found[-1])


if __name__ == "__main__":
    main()
