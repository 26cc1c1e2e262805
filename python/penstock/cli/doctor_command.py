"""penstock doctor: prints versions and facts about the machine for a bug report, and checks scripts
that were written for DeepSpeed."""

from __future__ import annotations

import argparse
import importlib


def _doctor(args: argparse.Namespace) -> int:
    if args.deepspeed:
        names = importlib.import_module("penstock.cli.doctor_names")
        return int(names.report(args.deepspeed))
    return int(importlib.import_module("penstock.cli.doctor_machine").report())  # imports torch


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    doctor = commands.add_parser("doctor", help=summary)
    doctor.add_argument(
        "--deepspeed",
        metavar="FOLDER",
        help="instead, read the Python files of FOLDER and print the deepspeed names in them that "
        "Penstock lacks, or that raise an error when they are used; the exit code is 1 if Penstock "
        "lacks any",
    )
    doctor.set_defaults(command=_doctor)
