"""The command line. It imports the module of the command that is given, and no other."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from penstock import __version__


class _Command(NamedTuple):
    module: str  # has add_to(commands, summary)
    summary: str  # in `penstock --help`


_COMMANDS = {
    "run": _Command("launch.command", "start the ranks of a script, here or on several nodes"),
    "plan": _Command(
        "plan_command", "will it fit, how fast: every strategy and offload choice for a model"
    ),
    "bench": _Command(
        "bench_command",
        "measure this machine: a calibration file for penstock plan and predictions",
    ),
    "status": _Command(
        "status_command", "where every rank of a run is, and which one the others wait for"
    ),
    "top": _Command(
        "top_command", "every rank of a run, live: step, speed, memory, and which one is late"
    ),
    "inspect": _Command("inspect_command", "what is in a checkpoint, and whether it is whole"),
    "report": _Command("report_command", "one HTML file about a run, or comparing two"),
    "convert": _Command(
        "convert_command", "checkpoints of DeepSpeed, torch and Hugging Face, in and out"
    ),
    "explain": _Command("explain_command", "print every effective value of a config"),
    "doctor": _Command("doctor_command", "versions and machine, for a bug report"),
}


def _parser(chosen: str) -> argparse.ArgumentParser:
    """With the options of the chosen command; of the others only their names and summaries."""
    parser = argparse.ArgumentParser(prog="penstock", description="Sharded training on torch.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(f"penstock.{command.module}")
            module.add_to(commands, command.summary)
        else:
            commands.add_parser(name, help=command.summary)
    return parser


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, n=1, cutoff=0.4)
    advice = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(_COMMANDS)}"
    return f'there is no command "{word}": {advice}'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A wrong value is one line and code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    if chosen and chosen not in _COMMANDS:
        print(f"penstock: {_unknown(chosen)}", file=sys.stderr)
        return 2
    args = _parser(chosen).parse_args(words)
    try:
        return int(args.command(args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
