"""Starts the ranks of a run, on one machine or on several. No rank outlives the launcher.

`launch` runs this node's ranks; `remote` starts a `penstock run` on each node, or one task per rank
through MPI or Slurm; `command` is the command line of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.launch.local import launch
from penstock.launch.options import RESUME, LaunchOptions, RankOptions

__all__ = ["RESUME", "LaunchOptions", "RankOptions", "deepspeed_main", "launch"]


def deepspeed_main(argv: Sequence[str] | None = None) -> int:
    """The `deepspeed` command (penstock.launch.command). Returns the exit code."""
    # Imported here, since the engine imports this package but does not need the command line.
    from penstock.launch import command  # noqa: PLC0415

    return command.deepspeed_main(argv)
