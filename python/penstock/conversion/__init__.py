"""Reads and writes checkpoints of other libraries: DeepSpeed, torch, Hugging Face.

A reader (`deepspeed`, `state_dicts`, `dcp`) turns a file or folder into a `Foreign`. `writers`
turns that into a Penstock checkpoint, and a Penstock checkpoint into files of other libraries. No
reader runs code from its source.
"""

from penstock.conversion.convert import convert
from penstock.conversion.options import Options

__all__ = ["Options", "convert"]
