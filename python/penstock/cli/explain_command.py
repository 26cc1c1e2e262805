"""penstock explain: prints every effective value of a config."""

from __future__ import annotations

import argparse
import json
import sys

from penstock._native import _penstock
from penstock.front import config_file


def _explain(args: argparse.Namespace) -> int:
    text = config_file.text_of(args.config)
    if _penstock.is_deepspeed_config(text):
        native, translated = config_file.translate(text, args.world)
        for one in translated.given:
            print(f"{one.key} = {one.value}: {one.fate} ({one.note})", file=sys.stderr)
        text = json.dumps(native)
    print(_penstock.Config(text).resolved(args.world).json(indent=2))
    return 0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    explain = commands.add_parser("explain", help=summary)
    explain.add_argument(
        "--config", required=True, metavar="FILE", help="JSON with Penstock's or DeepSpeed's keys"
    )
    explain.add_argument("--world", type=int, default=1, metavar="N", help="number of ranks")
    explain.set_defaults(command=_explain)
