#!/usr/bin/env python3
"""Reads whole fp32 weights from a checkpoint that an engine of deepspeed.initialize() saved.

As a script, zero_to_fp32.py CHECKPOINTS OUT writes files that from_pretrained() loads.
"""

from __future__ import annotations

import argparse
import glob
import os
import pathlib
import re
from typing import Any

import torch

from penstock import ConfigError
from penstock.conversion.convert import convert, state_dict
from penstock.conversion.options import Options


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns weights and buffers by name, on the CPU.

    Args:
        checkpoint_dir: the folder with the file `latest`.
        tag: the checkpoint's name; default: the newest.
        exclude_frozen_parameters: leave out parameters that do not train.
        lazy_mode: accepted, without effect: tensors are read at once.

    Raises:
        ConfigError: there is no checkpoint.
    """
    return state_dict(checkpoint_dir, tag or "", exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(  # noqa: PLR0913 - DeepSpeed's signature
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> None:
    """Writes the weights to a folder: model.safetensors (in shards), or pytorch_model.bin.

    Raises ConfigError for exclude_frozen_parameters with safe_serialization.
    """
    folder = pathlib.Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        )
        torch.save(state, folder / "pytorch_model.bin")
        return
    if exclude_frozen_parameters:
        raise ConfigError(
            "[zero_to_fp32] exclude_frozen_parameters is supported only for pytorch_model.bin: "
            "drop safe_serialization"
        )
    convert(checkpoint_dir, folder, Options(to="safetensors", tag=tag or ""))


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Loads the weights into a model that has no open engine, and returns it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state, strict=False)
    return model


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Returns the matching files, sorted by their numbers. Raises FileNotFoundError if there are
    none."""

    def parts(path: str) -> list[Any]:
        return [int(one) if one.isdigit() else one for one in re.split(r"(\d+)", path)]

    found = sorted(glob.glob(os.path.join(checkpoint_dir, glob_pattern)), key=parts)
    if not found:
        raise FileNotFoundError(f"no {glob_pattern} in {checkpoint_dir}")
    return found


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Returns the path of rank 0's file. Raises FileNotFoundError if it is missing."""
    name = "mp_rank_00_model_states.pt"
    path = os.path.join(checkpoint_dir, name if zero_stage <= 2 else f"zero_pp_rank_0_{name}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"no model states file at {path}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="folder with the file `latest`")
    parser.add_argument("output_dir", help="folder to write the weights to")
    parser.add_argument("--max_shard_size", default="5GB", help="no effect")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="checkpoint's name; default: the newest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    args: Any = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
