"""The command line. It imports only the module of the given command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from penstock import __version__

# Command -> its line in `penstock --help`.
_SUMMARIES = {
    "run": "start the ranks of a script, here or on several nodes",
    "plan": "memory and step time of a model for every strategy and offload choice",
    "bench": "measure this machine and write a calibration file for penstock plan and predictions",
    "status": "print the position of every rank of a run, and the rank that others wait for",
    "top": "show every rank of a run, live: step, speed, memory, and which rank is late",
    "inspect": "list the contents of a checkpoint and verify its checksums",
    "report": "write one HTML file about one run, or comparing two",
    "convert": "convert checkpoints from and to DeepSpeed, torch and Hugging Face",
    "deepspeed": "switch this environment from DeepSpeed to Penstock, or back",
    "explain": "print every effective value of a config",
    "doctor": "print versions and facts about the machine, for a bug report",
}


def _module_of(name: str) -> Any:
    """Imports the command's module, which has add_to(commands, summary)."""
    place = "penstock.launch.command" if name == "run" else f"penstock.cli.{name}_command"
    return importlib.import_module(place)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Makes a parser with the options of one command and the summaries of all commands."""
    parser = argparse.ArgumentParser(prog="penstock", description="Sharded training on torch.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in _SUMMARIES.items():
        if name == chosen:
            _module_of(name).add_to(commands, summary)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, _SUMMARIES, n=1, cutoff=0.4)
    advice = f'did you mean "{near[0]}"?' if near else f"the commands are {', '.join(_SUMMARIES)}"
    return f'there is no command "{word}": {advice}'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. An error prints one line and returns 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in words if not word.startswith("-")), "")
    if chosen and chosen not in _SUMMARIES:
        print(f"penstock: {_unknown(chosen)}", file=sys.stderr)
        return 2
    args = _parser(chosen).parse_args(words)
    try:
        return int(args.command(args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
