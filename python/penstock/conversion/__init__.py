"""Checkpoints of other libraries, read and written: DeepSpeed, torch, Hugging Face.

A reader (`deepspeed`, `state_dicts`, `dcp`) makes a `Foreign` of a file or folder; `writers` makes
a checkpoint of ours of it, or files of others of a checkpoint of ours. No reader runs code from
what it reads.
"""

from penstock.conversion.convert import convert
from penstock.conversion.options import Options

__all__ = ["Options", "convert"]
