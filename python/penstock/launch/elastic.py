"""Runs on nodes that may join and leave, with torch's elastic agent and its rendezvous.

Each node runs `penstock run --nnodes MIN:MAX`. The agents agree on the present nodes and start the
ranks. They restart the ranks when a rank fails, a node is lost or a node joins.
"""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.launch.local import node_environment
from penstock.launch.messages import LOG
from penstock.launch.options import LaunchOptions
from penstock.launch.processes import bootstrap

_MONITOR_S = 0.2  # interval at which the agent checks the ranks

# By default the ranks share the agent's store, and torch (2.13, DynamicRendezvousHandler) publishes
# its address in the first round only: a node that joins a later round waits for it in vain, and the
# run ends. With this variable each round publishes the address of a store of its own.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def launch_elastic(options: LaunchOptions) -> int:
    """Runs this node's ranks. Returns 0, or a failed rank's exit code when no restart is left.

    After a signal to the agent, returns 128 + signal. Raises ValueError if a log folder is given.
    """
    if options.rank.log_dir:
        raise ValueError(
            "[launch::elastic] --enable-each-rank-log is not supported with restarts on several "
            "nodes: drop one of them"
        )
    cores = options.rank.cores(options.nproc)
    os.environ.update(node_environment(options, cores))
    os.environ[_OWN_STORE] = "1"
    config = LaunchConfig(
        min_nodes=options.min_nodes or options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc,
        run_id="penstock",
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_backend="c10d",
        rdzv_configs={"last_call_timeout": max(1, int(options.grace_s))},
        max_restarts=options.max_restarts,
        monitor_interval=_MONITOR_S,
    )
    place = options.rank.local_rank_at(options.command)
    first = bootstrap(signal.SIGKILL, place, cores)
    try:
        elastic_launch(config, sys.executable)(*first, *options.rank.argv(options.command))
    except ChildFailedError as error:
        code = next(iter(error.failures.values())).exitcode
        LOG.error(str(error))
        return code if code > 0 else 128 - code
    except SignalException as error:
        LOG.warning(f"stopped by {error.sigval.name}")
        return 128 + int(error.sigval)
    return 0
