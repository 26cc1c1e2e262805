"""Runs loops.py and calls.py with DeepSpeed itself and writes recorded.json, for the tests.

    python tests/drop_in/record.py DEEPSPEED_PYTHON

DEEPSPEED_PYTHON: of an environment with deepspeed (0.19.8) and the packages of
requirements-dev.txt.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from trl_cases import CASES

HERE = pathlib.Path(__file__).parent
RECORDED = HERE / "recorded.json"


def cases_found(arguments: list[Any], folder: pathlib.Path) -> dict[str, Any]:
    """Runs Python in a folder, as one rank for which `import deepspeed` finds ours. Returns what it
    printed after "CASE "."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env | {"PENSTOCK_AS_DEEPSPEED": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = next(one for one in done.stdout.splitlines() if one.startswith("CASE "))
    return json.loads(line.removeprefix("CASE "))


def run(
    python: str, script: str, ranks: int, env: dict[str, str], arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """What a script's rank 0 prints after CASE, put together."""
    path = f"{pathlib.Path(python).parent}:{os.environ['PATH']}"
    torchrun = [python, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*torchrun, HERE / script, *arguments],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks), **env},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("CASE "):
            found |= json.loads(line.removeprefix("CASE "))
    if not found or done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return found


def run_trl(python: str, env: dict[str, str], names: Sequence[str], folder: str) -> dict[str, Any]:
    """What trl_trainers.py gives for these cases on two ranks, from several starts of 32 cases."""
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder}/cache", **env}
    found: dict[str, Any] = {}
    for first in range(0, len(names), 32):
        some = [folder, *names[first : first + 32]]
        found |= run(python, "trl_trainers.py", 2, env, some)
    return found


def main() -> None:
    reference = {"DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"trainers": [folder, "--deepspeed-first"], "accelerated": [folder]}
        recorded = {
            one: run(sys.argv[1], f"{one}.py", 2, reference, arguments.get(one, ()))
            for one in ("loops", "calls", "trainers", "accelerated")
        }
        recorded["trl"] = run_trl(sys.argv[1], reference, list(CASES), folder)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
