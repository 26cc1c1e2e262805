"""Runs over nodes that come and go, on torch's elastic agent and its rendezvous.

Each node runs `penstock run --nnodes MIN:MAX`; the agents agree on who is there, start the ranks,
and start them again when one fails or a node is lost or comes.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.launch import BOOTSTRAP, RESUME, LaunchOptions

_MONITOR_S = 0.2  # between two looks at the ranks


def launch_elastic(options: LaunchOptions) -> int:
    """Runs this node's ranks. Returns 0, or the exit code of a rank when no restart is left."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.nproc))
    )
    os.environ[RESUME] = options.resume
    config = LaunchConfig(
        min_nodes=options.min_nodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc,
        run_id="penstock",
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_backend="c10d",
        rdzv_configs={"last_call_timeout": max(1, int(options.grace_s))},
        max_restarts=options.max_restarts,
        monitor_interval=_MONITOR_S,
    )
    bootstrap = ["-I", "-S", "-c", BOOTSTRAP, str(os.getpid())]
    try:
        elastic_launch(config, sys.executable)(*bootstrap, *options.command)
    except ChildFailedError as error:
        code = next(iter(error.failures.values())).exitcode
        print(f"penstock run: {error}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    return 0
