"""Seconds until a command has done its work, beside `python -c "import torch"`.

Run it as `python benchmarks/startup.py`. The programs take turns, and the medians are printed.
Commands are started as the script `penstock` starts them, by this interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

CLI = "import sys; from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
CONFIG = '{"strategy": "zero3", "optimizer": {"lr": 1e-3}}'
TORCH = "import torch"
# Name -> arguments of the interpreter, and the most seconds that it may take (None: not limited).
PROGRAMS: dict[str, tuple[list[str], float | None]] = {
    TORCH: (["-c", TORCH], None),
    "import penstock": (["-c", "import penstock"], None),
    "import torch, penstock": (["-c", "import torch, penstock; penstock.initialize"], None),
    "penstock --help": (["-c", CLI, "--help"], 0.3),
    "penstock plan --params": (["-c", CLI, "plan", "--params", "7e9", "--world", "8"], 1.0),
    "penstock explain": (["-c", CLI, "explain", "--config", CONFIG], 1.0),
    "penstock status": (["-c", CLI, "status"], 1.0),
    "penstock run --help": (["-c", CLI, "run", "--help"], 1.0),
}


def seconds(arguments: list[str], folder: str) -> float:
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL
    )  # fmt: skip
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each program, after one for warmth")
    parser.add_argument("--json", metavar="FILE", help="write the medians there, too")
    args = parser.parse_args()
    measured: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:  # a tree beside us must not be imported
        for turn in range(args.runs + 1):
            for name, (arguments, _) in PROGRAMS.items():
                took = seconds(arguments, folder)
                if turn:
                    measured[name].append(took)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, median in medians.items():
        limit = PROGRAMS[name][1]
        verdict = "" if limit is None else f"  (at most {limit:g} s)"
        print(f"{name:<24}{median:6.2f} s  {median / medians[TORCH]:5.2f} x torch{verdict}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(medians, file, indent=2)


if __name__ == "__main__":
    main()
