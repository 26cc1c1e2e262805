"""The `deepspeed` command: runs `penstock run --as-deepspeed`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"
PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"


def main(args: Sequence[str] | None = None) -> int:
    """Starts the ranks of a script. Returns the exit code."""
    from penstock.launch import deepspeed_main  # noqa: PLC0415 - importing this module stays cheap

    return int(deepspeed_main(sys.argv[1:] if args is None else args))
