"""The options of `penstock bench`. The command passes them to its ranks."""

from __future__ import annotations

import argparse
import os
import pathlib

SEQUENCE = 128  # tokens
HEAD = 64  # values


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 3600")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options except --nproc."""
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16", "auto"),
        default="fp32",
        help="precision of compute and exchanges; use the precision of your training (default "
        "%(default)s; auto: bf16 where the device multiplies it fast, else fp32)",
    )
    parser.add_argument(
        "--width",
        type=int,
        default=512,
        metavar="W",
        help="width of the transformer block to time (default %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1024,
        metavar="T",
        help=f"tokens per rank, in sequences of {SEQUENCE} (default %(default)s)",
    )
    parser.add_argument(
        "--disk",
        metavar="DIR",
        help="folder on the disk to measure, as in offload.path (default: the system's folder "
        "for temporary files)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=16.0,
        metavar="S",
        help="total time to measure (default %(default)g), not counting the start of the ranks and "
        "the first steps",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="machine.json",
        metavar="FILE",
        help="file to write (default %(default)s)",
    )


def check(options: argparse.Namespace) -> None:
    """Raises ValueError if an option has an unusable value or the output cannot be written."""
    if options.width < 1 or (options.width > HEAD and options.width % HEAD):
        raise ValueError(
            f"[bench] --width {options.width}: give a multiple of {HEAD}, or a number below it"
        )
    if options.tokens < 1 or (options.tokens > SEQUENCE and options.tokens % SEQUENCE):
        raise ValueError(
            f"[bench] --tokens {options.tokens}: give a multiple of {SEQUENCE}, or a number below "
            f"it"
        )
    if options.disk is not None and not os.access(options.disk, os.W_OK | os.X_OK):
        raise ValueError(f"[bench] --disk {options.disk} is not a writable folder")
    output = pathlib.Path(options.output)
    there = output if output.exists() else output.absolute().parent
    if output.is_dir() or not output.absolute().parent.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"[bench] --output {output} is not a writable file")


def words(options: argparse.Namespace) -> list[str]:
    """Returns the options as arguments for the ranks."""
    given = {"precision": options.precision, "width": options.width, "tokens": options.tokens}
    given |= {"disk": options.disk, "seconds": options.seconds, "output": options.output}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
