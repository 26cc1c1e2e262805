"""The options of a conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

FORMATS = ("penstock", "dcp", "safetensors", "torch")
Say = Callable[[str], None]


@dataclasses.dataclass
class Options:
    """The source and target of a conversion.

    Attributes:
        to: "penstock", "dcp", "safetensors" or "torch".
        tag: name of a checkpoint in the source; default: the newest.
        key: key of the weights in a torch file or DCP, with dots between levels.
        dtype: dtype of the weights for "safetensors" and "torch"; default: unchanged (fp32
            masters).
        rules: how tensor ranks of DeepSpeed have cut the weights, by name patterns
            (docs/checkpoints.md); empty: as recorded in the checkpoint.
        inert: full names of classes whose objects in a pickle are skipped.
        say: called with lines about progress and about parts that are left out.
    """

    to: str = "penstock"
    tag: str = ""
    key: str = ""
    dtype: torch.dtype | None = None
    inert: Sequence[str] = ()
    rules: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    say: Say = dataclasses.field(default=lambda line: None)
