"""The disk tier against fio, and the optimizer on disk against both.

One interleaved run, all in the same folder with the same request size, depth and O_DIRECT:
sequential read, write and both at once, by fio and by the tier's own code; and training steps of a
model whose optimizer rests on disk, as bytes moved per second from the beginning of step() until
the last byte of the update is on disk. Figures are ratios round by round, and their medians.

    python benchmarks/disk.py --folder /scratch
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import measure
import torch
from torch import nn

import penstock

MODES = {"read": ("read", b"r"), "write": ("write", b"w"), "mixed": ("rw", b"m")}
NO_FIO = """fio is not installed, and this benchmark compares with it. To get it:
    apt-get install fio      (Debian, Ubuntu)
    dnf install fio          (Fedora, RHEL)
or see https://github.com/axboe/fio"""
WIDTH = 1024
STATE_BYTES = 12  # per parameter: fp32 master weights and two moments


def load(path: str) -> ctypes.CDLL:
    """The library of CMake target penstock_bench; torch must be imported first."""
    library = ctypes.CDLL(path)
    pointer = ctypes.c_void_p
    library.penstock_bench_disk_open.argtypes = (
        [ctypes.c_char_p] + [ctypes.c_int64] * 2 + [ctypes.c_int]
    )
    library.penstock_bench_disk_open.restype = pointer
    library.penstock_bench_disk_text.argtypes = [pointer]
    library.penstock_bench_disk_text.restype = ctypes.c_char_p
    library.penstock_bench_disk_run.argtypes = [pointer, ctypes.c_char]
    library.penstock_bench_disk_run.restype = ctypes.c_double
    library.penstock_bench_disk_close.argtypes = [pointer]
    return library


class Ours:
    """The tier's own code on its own file."""

    def __init__(self, library: ctypes.CDLL, folder: str, options: argparse.Namespace) -> None:
        self._library, self._bytes = library, options.bytes
        self._disk = library.penstock_bench_disk_open(
            folder.encode(), options.bytes, options.request, options.depth
        )
        self.text = library.penstock_bench_disk_text(self._disk).decode()

    def bandwidth(self, mode: str) -> float:
        seconds = self._library.penstock_bench_disk_run(self._disk, MODES[mode][1])
        return self._bytes / float(seconds)

    def close(self) -> None:
        self._library.penstock_bench_disk_close(self._disk)


class Fio:
    """fio on a file that is laid out before the first figure, with memory in huge pages as the
    engine's is: in small ones each request is cut into many pieces, at up to three times the cost.
    """

    def __init__(self, folder: str, text: str, options: argparse.Namespace) -> None:
        self._command = [
            "fio", "--name=disk", f"--filename={folder}/fio", f"--size={options.bytes}",
            f"--bs={options.request}", f"--iodepth={options.depth}", "--overwrite=1", "--thread",
            f"--ioengine={'io_uring' if 'io_uring' in text else 'libaio'}",
            f"--direct={int('O_DIRECT' in text)}", "--output-format=json",
        ]  # fmt: skip

    def bandwidth(self, mode: str) -> float:
        command = [*self._command, f"--rw={MODES[mode][0]}"]
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return float(moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3))


class Block(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Step:
    """An engine with its optimizer on disk; compute is next to nothing."""

    def __init__(self, folder: str, parameters: int, largest: float, window: int) -> None:
        torch.manual_seed(0)
        blocks = [Block(round(largest * parameters / (2 * WIDTH)))] if largest > 0 else []
        rest = max(1, round((1 - largest) * parameters / (8 * WIDTH * WIDTH)))
        model = nn.Sequential(*blocks, *[Block() for _ in range(rest)])
        self.parameters = sum(p.numel() for p in model.parameters())
        config = {
            "strategy": "zero3",
            "optimizer": {"type": "AdamW"},
            "units": {"modules": ["Block"]},
            "offload": {"optimizer": "disk", "path": folder, "window_bytes": window},
        }
        self.engine = penstock.initialize(model, config)
        self.bytes_per_parameter = 0.0

    def _moved(self) -> tuple[int, int]:
        measured = self.engine.ledger()["measured"]
        return measured["disk_read"], measured["disk_written"]

    def bandwidth(self) -> float:
        loss = self.engine(torch.ones(1, WIDTH)).square().mean()
        self.engine.backward(loss)
        read, written = self._moved()
        expected = self.engine.ledger()["measured"]["disk"]
        begin = time.perf_counter()
        self.engine.step()
        while self._moved()[1] < written + expected:
            time.sleep(1e-3)
        seconds = time.perf_counter() - begin
        moved = sum(self._moved()) - read - written
        self.bytes_per_parameter = moved / self.parameters
        return moved / seconds


def run(folder: str, options: argparse.Namespace) -> dict[str, object]:
    ours = Ours(load(options.library), folder, options)
    fio = Fio(folder, ours.text, options)
    step = Step(folder, options.parameters, options.largest, options.window)
    actions: dict[str, Callable[[], float]] = {}
    for mode in MODES:
        actions[f"fio {mode}"] = lambda mode=mode: fio.bandwidth(mode)
        actions[f"ours {mode}"] = lambda mode=mode: ours.bandwidth(mode)
    actions["step"] = step.bandwidth
    rates: dict[str, list[float]] = {name: [] for name in actions}
    ours.bandwidth("write")  # claims are not data yet
    for i in range(-1, options.rounds):
        names = list(actions)
        for name in names[:: -1 if i % 2 else 1]:
            rate = actions[name]()
            if i >= 0:
                rates[name].append(rate)
    ours.close()
    measured = step.engine.ledger()
    step.engine.close()
    pairs = {mode: (f"ours {mode}", f"fio {mode}") for mode in MODES}
    pairs["step"] = ("step", "fio mixed")
    return {
        "tier": ours.text,
        "machine": measure.machine(),
        "parameters": step.parameters,
        "bytes_per_parameter": step.bytes_per_parameter,
        "memory_over_predicted": measured["measured"]["total"]
        / measured["predicted"]["zero3"]["total"],
        "bytes_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "over_fio": {name: measure.ratio(rates[a], rates[b]) for name, (a, b) in pairs.items()},
        "rounds": rates,
    }


def show(result: dict, options: argparse.Namespace) -> None:
    print(
        f"{result['tier']}, requests of {options.request >> 10} KiB, depth {options.depth}, "
        f"median of {options.rounds}"
    )
    rates = result["bytes_per_s"]
    for name, (median, low, high) in result["over_fio"].items():
        fio = rates["fio mixed" if name == "step" else f"fio {name}"]
        own = rates["step" if name == "step" else f"ours {name}"]
        print(
            f"  {name:6s} {own / 1e9:6.2f} GB/s, fio {fio / 1e9:6.2f} GB/s, "
            f"ratio {median:.3f} ({low:.3f}-{high:.3f})"
        )
    print(
        f"  optimizer on disk: {result['parameters']:,} parameters, "
        f"{result['bytes_per_parameter']:.2f} bytes moved per parameter and step "
        f"(fp32 state read and written: {2 * STATE_BYTES}), "
        f"memory measured / predicted {result['memory_over_predicted']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = pathlib.Path(__file__).resolve().parent.parent
    default = root / "build" / "release" / "benchmarks" / "libpenstock_bench.so"
    parser.add_argument("--library", default=str(default), help="libpenstock_bench.so")
    parser.add_argument("--folder", help="on the disk to measure; default: for temporary files")
    parser.add_argument("--bytes", type=int, default=2 << 30, help="moved per figure")
    parser.add_argument("--request", type=int, default=4 << 20)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument(
        "--largest", type=float, default=0.0, help="share of the parameters in one unit (0 to 1)"
    )
    parser.add_argument("--window", type=int, default=192 << 20, help="offload.window_bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit(NO_FIO)
    if options.bytes % (options.depth * options.request) or options.depth % 2:
        sys.exit("--bytes must be a multiple of --depth (an even number) x --request")
    measure.init_group()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = run(folder, options)
    show(result, options)
    measure.write_json(options.json, result)


if __name__ == "__main__":
    main()
