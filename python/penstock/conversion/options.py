"""How to convert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

FORMATS = ("penstock", "dcp", "safetensors", "torch")
Say = Callable[[str], None]


@dataclasses.dataclass
class Options:
    """What is converted to what.

    Attributes:
        to: "penstock", "dcp", "safetensors" or "torch".
        tag: which of the checkpoints in the source; default: the newest.
        key: of a torch file or DCP: the key of the weights, dots between levels.
        dtype: of the weights that "safetensors" and "torch" write; default: as they are (fp32
            masters).
        rules: of DeepSpeed with several ranks of a model: how they have cut its weights, by name
            patterns (docs/checkpoints.md); empty: as the checkpoint says.
        inert: classes whose objects in a pickle are passed over, by full name.
        say: called with lines about what goes on and what is left out.
    """

    to: str = "penstock"
    tag: str = ""
    key: str = ""
    dtype: torch.dtype | None = None
    inert: Sequence[str] = ()
    rules: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    say: Say = dataclasses.field(default=lambda line: None)
