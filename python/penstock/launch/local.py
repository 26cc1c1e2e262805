"""Starts the ranks of a run on one node.

The launcher on node 0 also hosts the rendezvous store. So the store outlives rank 0, and its port
is known before the ranks start. Must be called from the main thread.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import queue
import signal
import time

from penstock.deepspeed import FOLDER
from penstock.launch import arrivals
from penstock.launch.layout import Slots
from penstock.launch.messages import LOG, speak
from penstock.launch.options import AS_DEEPSPEED, RESUME, LaunchOptions
from penstock.launch.processes import Child, Events, Task, first_stdout
from penstock.launch.rendezvous import rendezvous
from penstock.launch.supervision import Patience, report, signals_to, supervise

_ARRIVAL_S = 60.0  # after this time, ranks that have not connected to the store are reported


def node_environment(options: LaunchOptions, cores: list[Slots]) -> dict[str, str]:
    """Returns the environment that all ranks of the node share.

    It consists of defaults, then this process's environment, then the variables of the options.
    """
    mine = len(cores[0]) if cores else max(1, len(os.sched_getaffinity(0)) // options.nproc)
    defaults = {
        "OMP_NUM_THREADS": str(mine),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    told = dict(options.rank.env) | {RESUME: options.resume}
    if cores:
        told["OMP_NUM_THREADS"] = str(mine)
    if options.rank.devices is not None:
        told["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.rank.devices))
    if options.rank.as_deepspeed:
        told |= {
            AS_DEEPSPEED: "1",
            # For interpreters without Penstock's .pth file, and for the command `deepspeed`.
            "PYTHONPATH": _before("PYTHONPATH", FOLDER, ""),
            "PATH": _before("PATH", FOLDER / "bin", os.defpath),
            "LOCAL_SIZE": str(options.nproc),
            "CROSS_RANK": str(options.node_rank),
            "CROSS_SIZE": str(options.nnodes),
        }
    return defaults | dict(os.environ) | told


def _before(variable: str, folder: pathlib.Path, otherwise: str) -> str:
    """Returns the variable's list of folders with `folder` in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable, otherwise)]))


def rank_environment(
    options: LaunchOptions, local_rank: int, host: str, port: int
) -> dict[str, str]:
    """Returns the variables that differ between ranks, and the address of the store."""
    return {
        "RANK": str(options.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// is a client of the launcher's store
    }


def _task(options: LaunchOptions, env: dict[str, str], cores: list[Slots], stamp: str) -> Task:
    rank, local_rank = int(env["RANK"]), int(env["LOCAL_RANK"])
    folder = options.rank.log_dir
    prefix = f"[rank {rank}] ".encode() if options.world_size > 1 else b""
    return Task(
        name=f"rank {rank}",
        argv=options.rank.argv(options.command),
        env=env,
        prefix=prefix,
        stdout="stderr" if local_rank > 0 else first_stdout(options.nproc),
        prefix_stdout=prefix if local_rank > 0 else b"",
        log=str(pathlib.Path(folder) / f"{stamp}_rank{rank}.log") if folder else "",
        local_rank_at=options.rank.local_rank_at(options.command),
        cores=cores,
    )


def launch(options: LaunchOptions) -> int:
    """Runs this node's ranks until they end. After a failure it restarts them.

    It restarts them up to `max_restarts` times. The error of the rank that failed first is printed
    last.

    Returns:
        0 if all ranks succeeded; the exit code of the rank that failed first (128 + signal if it
        was killed); or 128 + signal if a signal stopped the launcher.
    """
    if not LOG.handlers:
        speak("warning")
    code, stopped = _run_once(options)
    for restart in range(1, options.max_restarts + 1):
        if code == 0 or stopped:
            break
        LOG.warning(f"restart {restart} of {options.max_restarts}")
        code, stopped = _run_once(dataclasses.replace(options, resume="auto"))
    return code


def _say_missing(text: str) -> None:
    LOG.warning(f"{text}; `penstock status {os.getpid()}` shows this again")


def _run_once(options: LaunchOptions) -> tuple[int, bool]:
    """Runs the ranks once. Returns the exit code and whether a signal stopped the launcher."""
    events: Events = queue.SimpleQueue()
    children: list[Child] = []
    cores = options.rank.cores(options.nproc)
    common = node_environment(options, cores)
    stamp = time.strftime("%Y%m%d%H%M%S")
    with rendezvous(options, events) as meeting, signals_to(events):
        try:
            for local_rank in range(options.nproc):
                place = rank_environment(options, local_rank, meeting.host, meeting.port)
                children.append(Child(_task(options, common | place, cores, stamp)))
                children[-1].watch(events)
            pids = [child.pid for child in children]
            with arrivals.watched(pids, _say_missing, _ARRIVAL_S):
                end = supervise(
                    children,
                    events,
                    Patience(options.grace_s),
                    lambda child: meeting.fail(child.exit_code, child.failure()),
                )
            first = meeting.first_failure()
        finally:
            for child in children:
                if child.returncode is None:
                    child.reap()
    if end.failed is not None:
        code = report(end.failed)
        return (first[0] if first else code), end.stopped_by != 0
    if end.elsewhere and first:
        LOG.error(f"the run failed elsewhere: {first[1]}")
        return first[0], False
    if end.stopped_by:
        LOG.warning(f"stopped by {signal.Signals(end.stopped_by).name}")
        return 128 + end.stopped_by, True
    return 0, False


def dry_run(options: LaunchOptions) -> list[list[str]]:
    """Returns the argument vectors of the ranks, each with the variables that Penstock sets."""
    vectors = []
    cores = options.rank.cores(options.nproc)
    common = node_environment(options, cores)
    names = ["CUDA_VISIBLE_DEVICES"] if options.rank.devices is not None else []
    names += [AS_DEEPSPEED] if options.rank.as_deepspeed else []
    host, port = options.endpoint()
    for local_rank in range(options.nproc):
        place = rank_environment(options, local_rank, host, port)
        del place["TORCHELASTIC_USE_AGENT_STORE"]
        if port == 0:
            del place["MASTER_PORT"]  # the kernel chooses the port when the run starts
        told = {name: common[name] for name in names} | dict(options.rank.env) | place
        argv = options.rank.argv(options.command)
        if at := options.rank.local_rank_at(options.command):
            argv.insert(at, f"--local_rank={local_rank}")
        vectors.append(["env", *(f"{name}={value}" for name, value in told.items()), *argv])
    return vectors
