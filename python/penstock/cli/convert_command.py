"""penstock convert: converts checkpoints from and to DeepSpeed, torch and Hugging Face."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from typing import Any

from penstock._native import ConfigError


def _convert(args: argparse.Namespace) -> int:
    conversion = importlib.import_module("penstock.conversion")  # imports torch
    parse_dtype = importlib.import_module("penstock.conversion.convert").parse_dtype
    made = conversion.convert(
        args.source,
        args.out,
        conversion.Options(
            to=args.to,
            tag=args.tag,
            key=args.key,
            dtype=parse_dtype(args.dtype) if args.dtype else None,
            inert=args.inert,
            rules=_rules(args.rules) if args.rules else {},
            say=lambda line: print(f"[convert] {line}", file=sys.stderr, flush=True),
        ),
    )
    print(made)
    return 0


def _rules(path: str) -> dict[str, Any]:
    try:
        held: dict[str, Any] = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f'[convert::rules] cannot read "{path}" as JSON: {error}') from error
    return held


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    convert = commands.add_parser(
        "convert",
        help=summary,
        description="Detects the format of SOURCE: a checkpoint of Penstock, DeepSpeed (ZeRO 1, 2, "
        "3, universal) or torch.distributed.checkpoint, a Hugging Face folder, or a file of "
        "torch.save() or safetensors. The conversion runs no code from SOURCE.",
    )
    convert.add_argument("source", metavar="SOURCE")
    convert.add_argument("out", metavar="OUT", help="see --to")
    convert.add_argument(
        "--to",
        metavar="penstock|dcp|safetensors|torch",
        default="penstock",
        help='"penstock" (the default): OUT is a folder of checkpoints that gets a new "step-N"; '
        '"dcp": OUT is an empty folder; "safetensors": OUT is a folder for the weights, in files '
        'with Hugging Face names; "torch": OUT is a file for a state dict (held in memory)',
    )
    convert.add_argument(
        "--tag", default="", help="checkpoint of SOURCE to convert (default: the newest)"
    )
    convert.add_argument(
        "--key", default="", help="key of the weights in a torch file or DCP, such as model.encoder"
    )
    convert.add_argument(
        "--dtype", default="", metavar="fp32|bf16|fp16", help="dtype of the weights"
    )
    convert.add_argument(
        "--inert",
        action="append",
        default=[],
        metavar="CLASS",
        help="skip objects of this class in a pickle (may be repeated)",
    )
    convert.add_argument(
        "--rules",
        default="",
        metavar="FILE",
        help="JSON file that says how tensor ranks of DeepSpeed cut the weights, if the checkpoint "
        'does not record it: {"*.qkv": "column:3", "*.proj": "row"}',
    )
    convert.set_defaults(command=_convert)
