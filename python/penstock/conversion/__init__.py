"""Reads and writes checkpoints of other libraries: DeepSpeed, torch, Hugging Face.

A reader (`deepspeed`, `state_dicts`, `dcp`) converts a file or folder to a `Foreign`. `writers`
converts a `Foreign` to a Penstock checkpoint, and a Penstock checkpoint to files of other
libraries. No reader runs code from its source.
"""

from penstock.conversion.convert import convert
from penstock.conversion.options import Options

__all__ = ["Options", "convert"]
