"""DeepSpeed's small commands, built on Penstock's."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from penstock.cli import main as penstock
from penstock.launch import hostfile

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _refused(command: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command. An error prints one line and returns 2."""
    try:
        return command(list(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{command.__name__.removeprefix('_')}: {error}", file=sys.stderr)
        return 2


def report(argv: Sequence[str] | None = None) -> int:
    """ds_report: runs `penstock doctor`. Its options hide the list of operators, which is empty."""
    parser = argparse.ArgumentParser(prog="ds_report", description=report.__doc__)
    for name in ("--hide_operator_status", "--hide_errors_and_warnings"):
        parser.add_argument(name, action="store_true", help="no effect: there is no such list")
    parser.parse_args(argv)
    return penstock(["doctor"])


def bench(argv: Sequence[str] | None = None) -> int:
    """ds_bench: runs `penstock bench`, which measures exchanges, compute, memory and disk."""
    return penstock(["bench", *(sys.argv[1:] if argv is None else argv)])


def nvme_tune(argv: Sequence[str] | None = None) -> int:
    """ds_nvme_tune: there is nothing to tune, so it measures --nvme_dir with `penstock bench`."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description=nvme_tune.__doc__)
    parser.add_argument("--nvme_dir", required=True, metavar="DIR")
    print("the disk tier itself chooses the sizes and depths of its requests", file=sys.stderr)
    return penstock(["bench", "--disk", parser.parse_args(argv).nvme_dir])


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if found is None or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 400M or 1G")
    return int(found[1]) * _UNITS[found[2]]


def _ds_io(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ds_io",
        description="Measures writes (to the device, without the cache) or reads of a file with "
        "plain requests of --block_size.",
    )
    parser.add_argument("--folder", required=True, metavar="DIR")
    parser.add_argument("--io_size", type=_size, required=True, help="bytes, such as 400M or 1G")
    parser.add_argument("--block_size", type=_size, default=8 * 2**20, help="bytes (default 8M)")
    parser.add_argument("--loops", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument("--read", action="store_true", help="measure reads instead of writes")
    args = parser.parse_args(argv)
    path = pathlib.Path(args.folder) / f"ds_io.{os.getpid()}"
    try:
        written = [_write(path, args.io_size, args.block_size) for _ in range(args.loops)]
        took = [_read(path, args.block_size) for _ in written] if args.read else written
    finally:
        path.unlink(missing_ok=True)
    best = args.io_size / min(took) / 1e9
    kind = "read" if args.read else "write"
    print(f"{kind} of {args.io_size} bytes in {args.folder}: {best:.2f} GB/s (best of {len(took)})")
    return 0


def _write(path: pathlib.Path, size: int, block: int) -> float:
    data = os.urandom(min(block, size))
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, block):
            file.write(data[: size - begin])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def _read(path: pathlib.Path, block: int) -> float:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while file.read(block):
            pass
    return time.perf_counter() - start


def io(argv: Sequence[str] | None = None) -> int:
    """ds_io: measures the disk of a folder."""
    return _refused(_ds_io, argv)


def _ds_ssh(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Runs a command on all hosts.")
    parser.add_argument("-f", dest="hostfile", default=hostfile.DEFAULT, metavar="HOSTFILE")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args(argv)
    hosts = ",".join(host.name for host in hostfile.read_hostfile(args.hostfile))
    words = ["pdsh", "-R", "ssh", "-w", hosts, shlex.join(args.words)]
    return subprocess.run(words, check=False).returncode


def ssh(argv: Sequence[str] | None = None) -> int:
    """ds_ssh: runs a command on all hosts of a hostfile, with pdsh."""
    return _refused(_ds_ssh, argv)


def _ds_to_universal(argv: list[str]) -> int:
    module = importlib.import_module("deepspeed.checkpoint.ds_to_universal")  # imports torch
    module.main(module.parse_arguments(argv))
    return 0


def to_universal(argv: Sequence[str] | None = None) -> int:
    """ds_to_universal: makes a checkpoint that loads with any number of ranks."""
    return _refused(_ds_to_universal, argv)
