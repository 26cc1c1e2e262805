#!/usr/bin/env python3
"""Writes the weights of a checkpoint that an engine of deepspeed.initialize() saved, in one dtype.

Usage: zero_to_torch.py CHECKPOINTS OUT --dtype bf16
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from penstock.conversion.convert import convert, parse_dtype
from penstock.conversion.options import Options

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="folder with the file `latest`")
    parser.add_argument("output_dir", help="folder to write the weights to")
    names = sorted([*_DTYPES, *_DTYPES.values()])
    parser.add_argument("--dtype", choices=names, required=True, help="dtype to write")
    parser.add_argument("--max_shard_size", default="5GB", help="no effect")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default="", help="checkpoint's name; default: the newest")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = parser.parse_args(args)
    folder = pathlib.Path(given.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = parse_dtype(_DTYPES.get(given.dtype, given.dtype))
    if given.safe_serialization:
        convert(given.checkpoint_dir, folder, Options("safetensors", given.tag, dtype=dtype))
    else:
        out = folder / "pytorch_model.bin"
        convert(given.checkpoint_dir, out, Options("torch", given.tag, dtype=dtype))


if __name__ == "__main__":
    main()
