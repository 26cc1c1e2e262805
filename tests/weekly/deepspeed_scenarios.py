"""Runs training scenarios with DeepSpeed and with the drop-in, and compares their losses.

    pip install --target FOLDER deepspeed==0.19.8   (with DS_BUILD_OPS=0)
    .venv/bin/python tests/weekly/deepspeed_scenarios.py --deepspeed FOLDER [--only NAME ...]

Each file scenarios_*.py of this folder has a dict SCENARIOS: name -> function(deepspeed, rank,
world). The function trains about 10 steps with the package that it gets, and returns a list of
numbers, texts or lists of them, mostly losses. It runs on every rank, on a gloo group that is
ready; torch's seed is 0. Scenarios share processes, as imports take most of the time; one that
fails or differs runs again in processes of its own before it is reported. The file may also have
    RANKS: name -> number of ranks; default 2
    DIFFERS: name -> the reason why the drop-in differs, as it is documented.
Numbers of both packages must agree on every rank to 1e-5, relative above 1. The command prints a
table and the counts, and exits with 1 if a scenario fails, differs without a reason, or has a
reason and does not differ. It exits with 0 if FOLDER has no DeepSpeed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 1e-5
RANKS = 2
TIMEOUT_S = 120


@dataclass
class Scenario:
    """One function of a scenarios file."""

    name: str
    file: str
    ranks: int
    differs: str  # the documented reason, or ""


def scenarios() -> list[Scenario]:
    sys.path.insert(0, str(HERE))
    found = []
    for path in sorted(HERE.glob("scenarios_*.py")):
        made = importlib.import_module(path.stem)
        ranks, differs = getattr(made, "RANKS", {}), getattr(made, "DIFFERS", {})
        for name in made.SCENARIOS:
            reason = differs.get(name, "")
            found.append(Scenario(name, path.stem, ranks.get(name, RANKS), reason))
    names = Counter(one.name for one in found)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise SystemExit(f"two scenarios have the same name: {', '.join(twice)}")
    return found


def serve(folder: str, rank: str, *scenarios: str) -> None:
    """On a rank: runs scenarios ("file:name"), and writes the result of each to a file of the
    folder. The first error ends the process, since other ranks may wait."""
    import torch  # noqa: PLC0415 - only on ranks

    torch.set_num_threads(1)
    import deepspeed  # noqa: PLC0415

    deepspeed.init_distributed(dist_backend="gloo")
    sys.path.insert(0, str(HERE))
    for index, one in enumerate(scenarios):
        file, _, name = one.partition(":")
        run = importlib.import_module(file).SCENARIOS[name]
        torch.manual_seed(0)
        found: dict[str, Any]
        try:
            found = {"values": run(deepspeed, int(rank), torch.distributed.get_world_size())}
            torch.distributed.barrier()
        except Exception as error:  # noqa: BLE001 - shown in the table
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        pathlib.Path(folder, f"{index}.{rank}").write_text(json.dumps(found))
        if "error" in found:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed's own exit aborts on a CPU


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def launched(scenarios: list[Scenario], env: dict[str, str], folder: str) -> list[str]:
    """Runs scenarios on one group of ranks until one fails; returns each rank's last line."""
    names = ("RANK", "WORLD_SIZE", "PYTHONPATH", "PENSTOCK_AS_DEEPSPEED")
    base = {key: value for key, value in os.environ.items() if key not in names}
    world, port = scenarios[0].ranks, str(free_port())
    base |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(world))
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **env}
    logs = [pathlib.Path(folder, f"log.{rank}") for rank in range(world)]
    told = [f"{one.file}:{one.name}" for one in scenarios]
    processes = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, __file__, "--serve", folder, str(rank), *told]
        with log.open("wb") as to:
            processes.append(
                subprocess.Popen(
                    command, env=base | own, cwd=folder, stdout=to, stderr=subprocess.STDOUT
                )
            )
    deadline = time.monotonic() + TIMEOUT_S + 20 * len(scenarios)
    while any(one.poll() is None for one in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
        if any(one.poll() is not None for one in processes):
            deadline = min(deadline, time.monotonic() + 20)  # the others may wait for it
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    if os.environ.get("SHOW"):
        print("\n".join(log.read_text(errors="replace") for log in logs))
    return [ending(log) for log in logs]


def results(scenarios: list[Scenario], env: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """What each scenario returned by rank; all have the same number of ranks."""
    found: dict[str, list[dict[str, Any]]] = {}
    rest = list(scenarios)
    while rest:
        with tempfile.TemporaryDirectory() as folder:
            endings = launched(rest, env, folder)
            for index, one in enumerate(rest):
                places = [pathlib.Path(folder, f"{index}.{rank}") for rank in range(one.ranks)]
                found[one.name] = [
                    json.loads(place.read_text()) if place.exists() else {"error": end}
                    for place, end in zip(places, endings, strict=True)
                ]
                if any("error" in rank for rank in found[one.name]):
                    break
            rest = rest[index + 1 :]
    return found


def ending(log: pathlib.Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def difference(theirs: Any, ours: Any, place: str = "") -> str:
    """Where two results differ; "" if they agree."""
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return f"{place or 'list'}: {len(theirs)} and {len(ours)} values"
        pairs = enumerate(zip(theirs, ours, strict=True))
        return next(filter(None, (difference(a, b, f"{place}[{i}]") for i, (a, b) in pairs)), "")
    numbers = [one for one in (theirs, ours) if isinstance(one, int | float)]
    if len(numbers) == 2:
        if math.isnan(theirs) and math.isnan(ours):
            return ""
        near = theirs == ours or abs(theirs - ours) <= LIMIT * max(1.0, abs(theirs))
        return "" if near else f"{place}: {theirs!r} and {ours!r}"
    return "" if theirs == ours else f"{place}: {theirs!r} and {ours!r}"


def compared(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """How the drop-in differs from DeepSpeed; "" if it does not."""
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        errors = [
            f"{side}: {one['error']}"
            for side, one in (("DeepSpeed", their), ("drop-in", our))
            if "error" in one
        ]
        found = "; ".join(errors) or difference(their["values"], our["values"])
        if found:
            return f"rank {rank}: {found}"
    return ""


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, or beginnings of names")
    options = parser.parse_args()
    if not (pathlib.Path(options.deepspeed) / "deepspeed").is_dir():
        print(f"{options.deepspeed} has no DeepSpeed: nothing is compared")
        return 0
    folder = str(pathlib.Path(options.deepspeed).resolve())
    real = {"PYTHONPATH": folder, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    own = {"PENSTOCK_AS_DEEPSPEED": "1"}
    counts: Counter[str] = Counter()
    chosen = [
        one for one in scenarios() if not options.only or one.name.startswith(tuple(options.only))
    ]
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for ranks in sorted({one.ranks for one in chosen}):
        same = [one for one in chosen if one.ranks == ranks]
        theirs |= results(same, real)
        ours |= results(same, own)
    for one in chosen:
        found = compared(theirs[one.name], ours[one.name])
        if found and not one.differs and len(chosen) > 1:
            theirs |= results([one], real)
            ours |= results([one], own)
            found = compared(theirs[one.name], ours[one.name])
        if found and one.differs and all("values" in rank for rank in theirs[one.name]):
            kind, text = "differs with documented reason", f"{one.differs} ({found})"
        elif found:
            kind, text = "fails", found
        elif one.differs:
            kind, text = "fails", f"equal, but has the reason: {one.differs}"
        else:
            kind, text = "equal", f"{ours[one.name][0]['values']}"[:90]
        counts[kind] += 1
        print(f"{kind.split()[0]:8} {one.name:32} {text}", flush=True)
    for kind in ("equal", "differs with documented reason", "fails"):
        print(f"{counts[kind]:6} {kind}")
    return int(counts["fails"] > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
