"""Converts one checkpoint to a folder that any number of ranks can load.

The result is a checkpoint of Penstock, which engine.load_checkpoint() reads with or without
"load_universal". The source may come from DeepSpeed (ZeRO 1 to 3, with tensor ranks and stages) or
from Penstock.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from penstock.conversion import universal


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", required=True, help="one checkpoint: DIR/TAG")
    parser.add_argument("--output_folder", required=True, help="folder to make")
    for name in ("extract", "merge"):
        text = "no effect: tensors are read one by one"
        parser.add_argument(f"--num_{name}_workers", type=int, default=1, help=text)
    text = "no effect: no temporary folder is made"
    parser.add_argument("--keep_temp_folder", action="store_true", help=text)
    text = "no effect: every tensor is checked"
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=text)
    text = "no effect: the checkpoint must say how tensor ranks cut weights"
    parser.add_argument("--inject_missing_state", action="store_true", help=text)
    return parser.parse_args(args)


def main(args: Any = None) -> None:
    """Makes `args.output_folder` from `args.input_folder`, and writes the file latest_universal.

    Raises ConfigError or RuntimeFault if the checkpoint cannot be converted.
    """
    given = parse_arguments() if args is None else args
    source, out = pathlib.Path(given.input_folder), pathlib.Path(given.output_folder)
    universal.make(source, out, print)
    (out.parent / "latest_universal").write_text(out.name, encoding="utf-8")


if __name__ == "__main__":
    main()
