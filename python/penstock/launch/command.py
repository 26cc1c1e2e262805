"""`penstock run` and the `deepspeed` command: turn the options into ranks to start on nodes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from penstock.front.environment import DEFAULT_PORT, NodePlace, node_place
from penstock.launch.arguments import add_options, node_range
from penstock.launch.backends import BACKENDS, Job, choose, ssh_args
from penstock.launch.exports import carried, default_env_files, read_env_file
from penstock.launch.hostfile import DEFAULT, Host, first, read_hostfile, select
from penstock.launch.layout import Node, parse_layout
from penstock.launch.local import dry_run, launch
from penstock.launch.messages import LOG, speak
from penstock.launch.options import LaunchOptions, RankOptions
from penstock.launch.remote import check_ssh, master_address, run_job
from penstock.launch.supervision import Patience, stop_on_end_of_stdin
from penstock.monitor import trace_request

_ELASTIC_RESTARTS = 100  # DeepSpeed's default
_OF_HOSTS = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "force_multi")
_OF_CONNECTIONS = ("launcher", "launcher_args", "ssh_port", "force_multi", "venv_script")
_OF_OUR_RANKS = (
    "bind_cores_to_rank",
    "bind_core_list",
    "enable_each_rank_log",
    "venv_script",
    "elastic_training",
    "max_restarts",
)


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns the options that were set, in their command line spelling."""
    unset = (None, "", 0, -1, False)
    return [_spelt(name) for name in names if getattr(args, name) not in unset]


def _without_effect(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Handles options that have no effect: an error, or a warning with --as-deepspeed."""
    given = ", ".join(_given(args, names))
    if given and not args.as_deepspeed:
        raise ValueError(f"[launch::command] {given} has no effect {why}: drop it")
    if given:
        LOG.warning(f"{given} has no effect {why}")


def _trace_variables(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for the --trace options.

    Raises ConfigError for a wrong value in an option or in a variable that is already set.
    """
    told = {
        trace_request.TRACE: os.path.abspath(args.trace) if args.trace else "",
        trace_request.STEPS: args.trace_steps,
        trace_request.PROFILER: "1" if args.trace_profiler else "",
    }
    told = {name: value for name, value in told.items() if value}
    trace_request.of_environment({**os.environ, **env, **told})
    return told


def rank_options(args: argparse.Namespace) -> RankOptions:
    folder = args.enable_each_rank_log
    env = read_env_file(args.env_file) if args.env_file else {}
    return RankOptions(
        module=args.module,
        no_python=args.no_python,
        as_deepspeed=args.as_deepspeed,
        local_rank=args.as_deepspeed and not args.no_local_rank,
        bind_cores=args.bind_cores_to_rank,
        core_list=args.bind_core_list or "",
        log_dir="" if folder == "None" else folder,
        env=env | _trace_variables(args, env),
    )


def _elastic_range(args: argparse.Namespace, nnodes: int) -> tuple[int, int]:
    """Returns the minimum and maximum number of nodes of --elastic-training.

    Raises ValueError if they are out of range.
    """
    least, most = max(1, args.min_elastic_nodes), args.max_elastic_nodes
    most = nnodes if most < 1 else most
    if not least <= most <= nnodes:
        raise ValueError(
            f"[launch::command] --min-elastic-nodes {least} --max-elastic-nodes {most}: allowed "
            f"are 1 to {nnodes} nodes, and a minimum that is not above the maximum"
        )
    return least, most


def _restarts(args: argparse.Namespace) -> int:
    if args.max_restarts is not None:
        return int(args.max_restarts)
    return _ELASTIC_RESTARTS if args.elastic_training else 0


def _endpoint(args: argparse.Namespace, nnodes: int, place: NodePlace) -> str:
    """Returns HOST:PORT of node 0; "" on a single node if no address or port was given."""
    if args.rdzv_endpoint and (args.master_addr or args.master_port):
        raise ValueError("[launch::command] give --rdzv-endpoint or --master-addr, not both")
    if args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    host = args.master_addr or (place.master if nnodes > 1 else "127.0.0.1")
    if not host or (nnodes == 1 and not (args.master_addr or args.master_port)):
        return ""
    return f"{host}:{args.master_port or place.port}"


def _node_rank(args: argparse.Namespace, nnodes: int, place: NodePlace) -> int:
    if args.node_rank is not None:
        return int(args.node_rank)
    if nnodes > 1 and place.node_rank < 0 and args.no_ssh:
        raise ValueError(f"[launch::command] --no-ssh needs --node-rank, 0 to {nnodes - 1}")
    return max(0, place.node_rank) if nnodes > 1 else 0


def _nodes_of_pod(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the node range in Kubeflow's (torchrun's) PET_NNODES; one node if it is not set."""
    return node_range(environ.get("PET_NNODES") or "1")


def _num_devices() -> int:
    """Returns the number of accelerators, at least 1. Imports torch only when it is called."""
    return int(importlib.import_module("torch").accelerator.device_count()) or 1


def _nproc(args: argparse.Namespace) -> int:
    """Returns the number of ranks on this node: --nproc, PET_NPROC_PER_NODE (Kubeflow), or 1."""
    if args.nproc is not None:
        return int(args.nproc)
    each = os.environ.get("PET_NPROC_PER_NODE", "1")
    return int(each) if each.isdecimal() else _num_devices()


def _this_node(args: argparse.Namespace) -> LaunchOptions:
    """Returns what to start on this node, from --nproc and related options or the cluster."""
    if given := _given(args, _OF_HOSTS):
        raise ValueError(
            f"[launch::command] {', '.join(given)} start all nodes from here, but --nproc, "
            f"--nnodes, --rdzv-endpoint and --layout start only this node's ranks: use options of "
            f"one kind"
        )
    place = node_place(os.environ)
    slots = parse_layout(args.layout) if args.layout else ()
    least, most = args.nnodes or ((len(slots),) * 2 if slots else _nodes_of_pod(os.environ))
    if args.elastic_training:
        least, most = _elastic_range(args, most)
    node_rank = _node_rank(args, len(slots) or most, place)
    if slots and not 0 <= node_rank < len(slots):
        raise ValueError(f"[launch::command] --node-rank must be 0 to {len(slots) - 1}")
    if slots and args.nproc is not None:
        raise ValueError("[launch::command] give --layout or --nproc, not both")
    ranks = [len(one) for one in slots] if most == len(slots) else []
    return LaunchOptions(
        command=[args.script, *args.args],
        nproc=len(slots[node_rank]) if slots else _nproc(args),
        nnodes=most,
        node_rank=min(node_rank, most - 1) if slots else node_rank,
        rdzv_endpoint=_endpoint(args, most, place),
        grace_s=args.grace_s,
        max_restarts=_restarts(args),
        resume=args.resume,
        min_nodes=least,
        ranks_on=ranks,
        rank=dataclasses.replace(rank_options(args), devices=slots[node_rank] if slots else None),
    )


def _selected(args: argparse.Namespace, hosts: Sequence[Host]) -> list[Node]:
    """Returns the nodes and slots that the options choose."""
    counts = _given(args, ("num_nodes", "num_gpus"))
    for name in ("num_nodes", "num_gpus"):
        if getattr(args, name) != -1 and getattr(args, name) < 1:
            raise ValueError(f"[launch::command] {_spelt(name)} must be at least 1")
    if args.include or args.exclude:
        if counts:
            raise ValueError(
                f"[launch::command] {', '.join(counts)} cannot be combined with --include or "
                f"--exclude, which already choose the slots; drop one of them"
            )
        return select(hosts, args.include, args.exclude)
    return first(hosts, max(0, args.num_nodes), max(0, args.num_gpus))


def _this_machine(args: argparse.Namespace) -> LaunchOptions:
    """Returns what to start on this machine if there is no hostfile."""
    _without_effect(args, _OF_CONNECTIONS, "without a hostfile")
    if args.num_nodes > 1:
        raise ValueError(f"[launch::command] --num-nodes {args.num_nodes} needs a --hostfile")
    if args.elastic_training:
        raise ValueError(
            "[launch::command] --elastic-training needs a --hostfile, or --nnodes MIN:MAX"
        )
    chosen = _given(args, ("include", "exclude", "num_gpus"))
    devices = _num_devices()
    if args.num_gpus > 0:
        devices = args.num_gpus
    elif not chosen and not args.as_deepspeed:
        devices = 1
    nodes = _selected(args, [Host("localhost", devices, "this machine")])
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen and seen:
        LOG.info(f"CUDA_VISIBLE_DEVICES={seen} is replaced because of {' '.join(chosen)}")
    return _on_node(args, nodes, 0, devices=bool(chosen))


def _on_node(
    args: argparse.Namespace, nodes: Sequence[Node], node_rank: int, *, devices: bool = True
) -> LaunchOptions:
    """Returns what to start here as node `node_rank` of the nodes."""
    if not 0 <= node_rank < len(nodes):
        raise ValueError(f"[launch::command] --node-rank must be 0 to {len(nodes) - 1}")
    slots = nodes[node_rank].slots
    least = most = len(nodes)
    if args.elastic_training:
        least, most = _elastic_range(args, len(nodes))
    place = NodePlace(master=nodes[0].name.rpartition("@")[2])
    return LaunchOptions(
        command=[args.script, *args.args],
        nproc=len(slots),
        nnodes=most,
        node_rank=min(node_rank, most - 1),  # elastic runs only distinguish node 0
        rdzv_endpoint=_endpoint(args, len(nodes), place),
        grace_s=args.grace_s,
        max_restarts=_restarts(args),
        resume=args.resume,
        min_nodes=least,
        ranks_on=[len(node.slots) for node in nodes] if least == len(nodes) else [],
        rank=dataclasses.replace(rank_options(args), devices=slots if devices else None),
    )


def run_options(args: argparse.Namespace) -> list[str]:
    """Returns the options that are passed on to `penstock run` on each node."""
    words = ["--grace-s", str(args.grace_s), "--resume", args.resume]
    words += ["--max-restarts", str(_restarts(args))]
    flags = ["module", "no_python", "bind_cores_to_rank", "as_deepspeed", "no_local_rank"]
    words += _given(args, [*flags, "elastic_training"])
    values = ["bind_core_list", "enable_each_rank_log", "log_level"]
    values += ["min_elastic_nodes", "max_elastic_nodes"] if args.elastic_training else []
    for name in values:
        words += [
            word for given in _given(args, [name]) for word in (given, str(getattr(args, name)))
        ]
    return words


def _job(args: argparse.Namespace, nodes: Sequence[Node], launcher: str) -> Job:
    """Returns the job for the nodes, with an empty endpoint."""
    if not BACKENDS[launcher].per_node:
        why = f"with --launcher {launcher}, which starts the ranks itself"
        _without_effect(args, _OF_OUR_RANKS, why)
    rank = rank_options(args)
    words = shlex.split(args.launcher_args)
    env = carried(os.environ, args.export_prefixes)
    for path in default_env_files(os.environ):
        LOG.info(f"variables are read from {path}")
        env |= read_env_file(path)
    return Job(
        command=[args.script, *args.args],
        nodes=nodes,
        endpoint="",
        env=env | dict(rank.env),
        rank=rank,
        run_options=run_options(args),
        resume=args.resume,
        ssh_port=args.ssh_port,
        launcher_args=words,
        ssh_args=ssh_args(launcher, words),
        venv_script=args.venv_script,
    )


def _run_job(args: argparse.Namespace, nodes: Sequence[Node], launcher: str) -> int:
    """Runs a job through a launcher, on several nodes or on one other node."""
    lost = len(nodes) - _elastic_range(args, len(nodes))[0] if args.elastic_training else 0
    job = _job(args, nodes, launcher)
    per_node = BACKENDS[launcher].per_node
    if per_node and not args.no_ssh_check and not args.dry_run:
        check_ssh(job)
    host = args.master_addr
    if not host and launcher != "slurm":  # Slurm's tasks find the host themselves
        host = nodes[0].name.rpartition("@")[2] if args.dry_run else master_address(job)
    job = dataclasses.replace(
        job, endpoint=f"{host}:{args.master_port or DEFAULT_PORT}" if host else ""
    )
    if args.dry_run:
        return _print(BACKENDS[launcher].vectors(job))
    told = ", ".join(f"{node.name}: {len(node.slots)}" for node in nodes if node.name)
    LOG.info(f"{launcher} starts {job.world_size or 'all'} ranks" + (f" on {told}" if told else ""))
    return run_job(job, launcher, Patience(args.grace_s, num_lost=lost))


def _print(vectors: Sequence[Sequence[str]]) -> int:
    for vector in vectors:
        print(shlex.join(vector))
    return 0


def _run_here(args: argparse.Namespace, options: LaunchOptions) -> int:
    if args.dry_run:
        return _print(dry_run(options))
    if args.trace and options.node_rank == 0:
        trace_request.check_folder(args.trace)
    several = options.nnodes > 1
    restarted = options.max_restarts > 0 or options.min_nodes < options.nnodes
    if several and restarted:
        elastic = importlib.import_module("penstock.launch.elastic")
        return int(elastic.launch_elastic(options))
    return launch(options)


def _hostfile(args: argparse.Namespace) -> str:
    """Returns the path of the hostfile; "" for none."""
    if not args.hostfile:
        return DEFAULT if os.path.isfile(DEFAULT) else ""
    if args.as_deepspeed and not os.path.isfile(args.hostfile):
        LOG.warning(f"there is no hostfile {args.hostfile}: only this machine is used")
        return ""
    return str(args.hostfile)


def _nodes_of_slurm(args: argparse.Namespace) -> list[Node]:
    """Returns as many unnamed nodes as the options ask for; [] for the allocation's nodes."""
    if given := _given(args, ("include", "exclude")):
        raise ValueError(f"[launch::command] {', '.join(given)} needs a --hostfile")
    if args.num_nodes < 1 and args.num_gpus < 1:
        return []
    nodes = max(1, args.num_nodes, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    nodes = args.num_nodes if args.num_nodes > 0 else nodes
    return [Node("", tuple(range(max(1, args.num_gpus))))] * nodes


def _start(args: argparse.Namespace) -> int:
    own = args.layout or args.nproc is not None or args.nnodes or args.rdzv_endpoint
    pod = "PET_NNODES" in os.environ and not (args.as_deepspeed or _given(args, _OF_HOSTS))
    if own or pod:
        return _run_here(args, _this_node(args))
    path = _hostfile(args)
    if not path and args.launcher.lower() == "slurm":
        return _run_job(args, _nodes_of_slurm(args), "slurm")
    if not path:
        return _run_here(args, _this_machine(args))
    nodes = _selected(args, read_hostfile(path))
    if args.no_ssh:
        place = node_place(os.environ)
        return _run_here(args, _on_node(args, nodes, _node_rank(args, len(nodes), place)))
    launcher = choose(args.launcher)
    if len(nodes) > 1 or args.force_multi:
        return _run_job(args, nodes, launcher)
    LOG.info(f"the ranks start here; with --force-multi they start on {nodes[0].name}")
    return _run_here(args, _on_node(args, nodes, 0))


@contextlib.contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    """Keeps the file PID.deepspeed in the temporary folder while the launcher runs.

    Scripts that start DeepSpeed read it there.
    """
    path = pathlib.Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    if not wanted:
        yield
        return
    path.unlink(missing_ok=True)  # left by an earlier process with the same id
    with open(path, "x", encoding="ascii") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run(args: argparse.Namespace) -> int:
    """Runs the command with the given options and returns the exit code."""
    speak("error" if args.quiet else args.log_level)
    if args.autotuning:
        if not args.as_deepspeed:
            raise ValueError("[launch::command] --autotuning needs --as-deepspeed")
        return int(importlib.import_module("penstock.launch.autotuning").tune(args, run))
    if args.end_with_stdin:
        stop_on_end_of_stdin()
    with _pid_file(args.save_pid):
        return _start(args)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command `run` to Penstock's command line."""
    parser = commands.add_parser("run", help=summary)
    add_options(parser, "penstock run")
    parser.set_defaults(command=run)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of `deepspeed`."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Runs DeepSpeed scripts with Penstock."
    )
    add_options(parser, "deepspeed")
    args = parser.parse_args(argv)
    args.as_deepspeed = True
    return args


def deepspeed_main(argv: Sequence[str] | None = None) -> int:
    """The `deepspeed` command, which is `penstock run --as-deepspeed`.

    Without a hostfile it starts one rank for each device of this machine. Returns the exit code;
    an error prints one line and returns 2.
    """
    args = parse(argv)
    try:
        return run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2
