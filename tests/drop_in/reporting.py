"""How the scripts that run on each rank say what they found; record.run() reads it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn


def report(names: Iterable[str], run: Callable[[str], dict[str, Any]]) -> NoReturn:
    """Runs each case, prints a line of JSON for it on rank 0, and ends the process.

    What a case raises is what was found; with SHOW=1 in the environment it is raised.
    """
    for name in names:
        try:
            found = run(name)
        except Exception as error:  # noqa: BLE001 - recorded, and the tests look at it
            if os.environ.get("SHOW"):
                raise
            first = (str(error).splitlines() or [""])[0]
            found = {"error": f"{type(error).__name__}: {first}"}
        if int(os.environ.get("RANK", "0")) == 0:
            print("\nCASE " + json.dumps({name: found}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's own exit aborts on a CPU
