"""The options of `penstock run`, which are also those of the `deepspeed` command.

Each option may be spelt with hyphens or, as in DeepSpeed, with underscores. --help shows hyphens.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

from penstock.launch.backends import BACKENDS
from penstock.launch.exports import PREFIXES
from penstock.launch.hostfile import DEFAULT
from penstock.launch.messages import LEVELS
from penstock.monitor.trace_request import DEFAULT_STEPS


class Formatter(argparse.HelpFormatter):
    """Shows only the spelling with hyphens of each option."""

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
        """Adds an option, and the underscore spelling of each long name that has a hyphen."""
        spelt: list[str] = []
        for name in names:
            spelt.append(name)
            if "-" in name[2:]:
                spelt.append("--" + name[2:].replace("-", "_"))
        self._group.add_argument(*spelt, **settings)


def node_range(text: str) -> tuple[int, int]:
    """Parses "N" or "MIN:MAX" into (min, max)."""
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def list_of_numbers(text: str) -> str:
    """Returns the text of a list. Raises argparse.ArgumentTypeError if the list is empty: it then
    comes from an unset variable, and would look like an option that was not given."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the list is empty; give numbers, or drop the option")
    return text


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "the run")
    group.add(
        "--grace-s",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds that the launcher waits for other ranks to end after a failure, for ranks to "
        "save after a signal, and for nodes to join",
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
        help='what engine.load("auto") loads: the newest checkpoint in "checkpoint.path" '
        "(default), nothing, or this checkpoint",
    )
    group.add(
        "--trace",
        default="",
        metavar="FILE",
        help="rank 0 writes a timeline of all ranks to FILE, for ui.perfetto.dev",
    )
    group.add(
        "--trace-steps",
        default="",
        metavar="FIRST:LAST",
        help=f"steps of the timeline (default {DEFAULT_STEPS})",
    )
    group.add(
        "--trace-profiler",
        action="store_true",
        help="add events of torch's profiler to the timeline",
    )
    group.add("--dry-run", action="store_true", help="print the commands and start nothing")


def _add_node(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "ranks of this node", "every node runs this command for its own ranks")
    group.add("--nproc", type=int, metavar="N", help="ranks on this node (default 1)")
    group.add(
        "--nnodes",
        type=node_range,
        metavar="N|MIN:MAX",
        help="number of nodes; with a range the run continues when nodes join or fail (needs "
        "--max-restarts)",
    )
    group.add("--node-rank", type=int, metavar="I", help="number of this node, from 0")
    group.add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="address of node 0 (or use --master-addr and --master-port)",
    )
    group.add(
        "--layout",
        type=list_of_numbers,
        metavar="0-7@0-3",
        help="slots of each node if nodes differ, instead of --nproc and --nnodes",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "hosts and slots", "this command starts the ranks of all nodes")
    group.add(
        "-H",
        "--hostfile",
        default="",
        metavar="FILE",
        help=f"file with lines NAME slots=N (default {DEFAULT} if it exists)",
    )
    group.add(
        "-i",
        "--include",
        default="",
        metavar="HOST[:SLOT,...][@...]",
        help="use only these slots, such as node1@node2:0,2",
    )
    group.add(
        "-e",
        "--exclude",
        default="",
        metavar="HOST[:SLOT,...][@...]",
        help="use all slots except these",
    )
    group.add("--num-nodes", type=int, default=-1, metavar="N", help="use the first N hosts")
    group.add(
        "--num-gpus",
        "--num-accelerators",
        type=int,
        default=-1,
        dest="num_gpus",
        metavar="N",
        help="use the first N slots of each host: N ranks per node, also without GPUs",
    )
    group.add("--master-addr", default="", metavar="HOST", help="address of the first node")
    group.add("--master-port", type=int, metavar="PORT", help="default 29500")
    group.add(
        "--elastic-training",
        action="store_true",
        help="nodes may join and leave; restarts up to 100 times, or --max-restarts times",
    )
    group.add("--min-elastic-nodes", type=int, default=-1, metavar="N", help="default 1")
    group.add("--max-elastic-nodes", type=int, default=-1, metavar="N", help="default all")


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "reaching the hosts")
    group.add(
        "--launcher",
        default="",
        metavar="|".join(BACKENDS),
        help="default pdsh if it is installed, else ssh",
    )
    group.add(
        "--launcher-args", default="", metavar="ARGS", help="arguments of the launcher, as one word"
    )
    group.add("--ssh-port", type=int, default=0, metavar="PORT")
    group.add(
        "--no-ssh-check", action="store_true", help="do not test the connection to the hosts first"
    )
    group.add(
        "--no-ssh",
        action="store_true",
        help="start only the ranks of node --node-rank, on this machine",
    )
    group.add("--force-multi", action="store_true", help="use the launcher even for a single host")
    group.add(
        "--venv-script", default="", metavar="FILE", help="source this file on each node first"
    )
    group.add(
        "--env-file",
        default="",
        metavar="FILE",
        help="file with NAME=VALUE lines for the ranks; on several nodes the launcher also reads "
        ".deepspeed_env in the home folder and in this folder",
    )


def _add_ranks(parser: argparse.ArgumentParser, prog: str) -> None:
    group = _Group(parser, "each rank")
    # DeepSpeed's command has no -m, and its --launcher_args may begin with "-mca".
    short = [] if prog == "deepspeed" else ["-m"]
    group.add(*short, "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    group.add("--no-python", action="store_true", help="SCRIPT is a program")
    group.add(
        "--bind-cores-to-rank",
        action="store_true",
        help="bind each rank to an equal share of the cores",
    )
    group.add(
        "--bind-core-list",
        type=list_of_numbers,
        metavar="0-3,8",
        help="cores to bind ranks to",
    )
    group.add(
        "--enable-each-rank-log",
        default="",
        metavar="DIR",
        help="write the output of each rank to a file in DIR",
    )
    group.add(
        "--as-deepspeed", action="store_true", help="run a script that was written for DeepSpeed"
    )
    group.add(
        "--no-local-rank",
        action="store_true",
        help="with --as-deepspeed: do not pass --local_rank=N to the script",
    )
    group.add(
        "--autotuning",
        default="",
        choices=("tune", "run"),
        help="with --as-deepspeed: measure short runs with different ZeRO stages, offload and "
        'micro-batch sizes; "run" then runs the script with the fastest config',
    )


def _add_messages(parser: argparse.ArgumentParser, prog: str) -> None:
    group = _Group(parser, "messages")
    group.add("--log-level", default="info", choices=LEVELS, help="default: info")
    group.add("-q", "--quiet", action="store_true", help="print only errors")
    group.add(
        "--save-pid",
        action="store_true",
        help=f"write the process id of {prog} to a file PID.deepspeed in the temporary folder",
    )


def add_options(parser: argparse.ArgumentParser, prog: str) -> None:
    """Adds all options, the script and its arguments."""
    parser.formatter_class = Formatter
    parser.usage = f"{prog} [OPTION ...] SCRIPT [ARGUMENT ...]"
    _add_run(parser)
    _add_node(parser)
    _add_hosts(parser)
    _add_launcher(parser)
    _add_ranks(parser, prog)
    _add_messages(parser, prog)
    # The launcher passes this option on other nodes.
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(export_prefixes=PREFIXES)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGUMENT")
