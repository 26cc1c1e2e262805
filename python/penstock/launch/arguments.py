"""The options of `penstock run`, which are also those of the `deepspeed` command.

Each is spelt with hyphens, as ours are, and with underscores, as DeepSpeed's; --help shows one.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

from penstock.launch.backends import BACKENDS
from penstock.launch.hostfile import DEFAULT
from penstock.launch.messages import LEVELS
from penstock.monitor.trace_request import DEFAULT_STEPS


class Formatter(argparse.HelpFormatter):
    """Shows of two spellings of an option the one with hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)


class _Group:
    """An argument group in which every option has both spellings."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, description: str = ""):
        self._group = parser.add_argument_group(title, description or None)

    def add(self, *names: str, **settings: Any) -> None:
        """An option; a long name with a hyphen is also spelt with underscores."""
        spelt: list[str] = []
        for name in names:
            spelt.append(name)
            if "-" in name[2:]:
                spelt.append("--" + name[2:].replace("-", "_"))
        self._group.add_argument(*spelt, **settings)


def node_range(text: str) -> tuple[int, int]:
    """ "2" or "1:4"."""
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "the run")
    group.add(
        "--grace-s",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds the other ranks get to end by themselves after one failed, all of them "
        "to save when the run is told to stop, and nodes to come (back)",
    )
    group.add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start again after a failure, up to N times (default 0)",
    )
    group.add(
        "--resume",
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help='what engine.load("auto") loads: the newest of "checkpoint.path" (the default), '
        "nothing, or this one",
    )
    group.add(
        "--trace",
        default="",
        metavar="FILE",
        help="rank 0 writes a timeline of all ranks there, which ui.perfetto.dev opens",
    )
    group.add(
        "--trace-steps",
        default="",
        metavar="FIRST:LAST",
        help=f"of these steps (default {DEFAULT_STEPS})",
    )
    group.add(
        "--trace-profiler", action="store_true", help="with what torch's profiler sees in them"
    )
    group.add("--dry-run", action="store_true", help="print what would be started, start nothing")


def _add_node(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "ranks of this node", "each node starts its own, or there is only one")
    group.add("--nproc", type=int, metavar="N", help="ranks on this node (default 1)")
    group.add(
        "--nnodes",
        type=node_range,
        metavar="N|MIN:MAX",
        help="a range: the run goes on with the nodes that there are (needs --max-restarts)",
    )
    group.add("--node-rank", type=int, metavar="I", help="which node this is, from 0")
    group.add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="of node 0; or --master-addr and --master-port",
    )
    group.add(
        "--layout",
        default="",
        metavar="0-7@0-3",
        help="slots of each node where they differ, instead of --nproc and --nnodes",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "hosts and slots", "all nodes are started from here")
    group.add(
        "-H",
        "--hostfile",
        default="",
        metavar="FILE",
        help=f"lines NAME slots=N (default {DEFAULT} where it exists)",
    )
    group.add(
        "-i",
        "--include",
        default="",
        metavar="HOST[:SLOT,...][@...]",
        help="use these only, such as node1@node2:0,2",
    )
    group.add(
        "-e", "--exclude", default="", metavar="HOST[:SLOT,...][@...]", help="use all but these"
    )
    group.add("--num-nodes", type=int, default=-1, metavar="N", help="the first N hosts")
    group.add(
        "--num-gpus",
        "--num-accelerators",
        type=int,
        default=-1,
        dest="num_gpus",
        metavar="N",
        help="the first N slots of each host: ranks per node, on a machine without GPUs too",
    )
    group.add("--master-addr", default="", metavar="HOST", help="of the first node")
    group.add("--master-port", type=int, metavar="PORT", help="default 29500")
    group.add(
        "--elastic-training",
        action="store_true",
        help="nodes may come and go, with 100 restarts unless --max-restarts says otherwise",
    )
    group.add("--min-elastic-nodes", type=int, default=-1, metavar="N", help="default 1")
    group.add("--max-elastic-nodes", type=int, default=-1, metavar="N", help="default all")


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "reaching the hosts")
    group.add(
        "--launcher",
        default="",
        metavar="|".join(BACKENDS),
        help="default pdsh where it is installed, else ssh",
    )
    group.add("--launcher-args", default="", metavar="ARGS", help="for it, as one word")
    group.add("--ssh-port", type=int, default=0, metavar="PORT")
    group.add("--no-ssh-check", action="store_true", help="do not try the hosts first")
    group.add(
        "--no-ssh", action="store_true", help="start node --node-rank of the hosts, here and alone"
    )
    group.add("--force-multi", action="store_true", help="go to the host even if it is one")
    group.add("--venv-script", default="", metavar="FILE", help="source it on each node first")
    group.add(
        "--env-file",
        default="",
        metavar="FILE",
        help="NAME=VALUE lines for the ranks; on several nodes .deepspeed_env of the home and of "
        "this folder too",
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "each rank")
    group.add("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    group.add("--no-python", action="store_true", help="SCRIPT is a program")
    group.add(
        "--bind-cores-to-rank", action="store_true", help="each rank gets its share of the cores"
    )
    group.add("--bind-core-list", default="", metavar="0-3,8", help="share out these")
    group.add(
        "--enable-each-rank-log",
        default="",
        metavar="DIR",
        help="output goes to a file for each rank in DIR",
    )
    group.add("--as-deepspeed", action="store_true", help="the script is one of DeepSpeed's")
    group.add(
        "--no-local-rank",
        action="store_true",
        help="with --as-deepspeed: no --local_rank=N before the script's arguments",
    )


def _add_messages(parser: argparse.ArgumentParser, prog: str) -> None:
    group = _Group(parser, "messages")
    group.add("--log-level", default="info", choices=LEVELS, help="default info")
    group.add("-q", "--quiet", action="store_true", help="errors only")
    group.add(
        "--save-pid",
        action="store_true",
        help=f"keep the process id of {prog} in a file PID.deepspeed of the temporary folder",
    )


def add_options(parser: argparse.ArgumentParser, prog: str) -> None:
    """All of them, the script and its arguments."""
    parser.formatter_class = Formatter
    parser.usage = f"{prog} [OPTION ...] SCRIPT [ARGUMENT ...]"
    _add_run(parser)
    _add_node(parser)
    _add_hosts(parser)
    _add_launcher(parser)
    _add_ranks(parser)
    _add_messages(parser, prog)
    # Said on the nodes by the one that starts them; and DeepSpeed's, to be refused.
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--autotuning", nargs="?", const="tune", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGUMENT")
