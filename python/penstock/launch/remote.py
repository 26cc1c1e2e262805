"""Runs a job on several nodes. If one part of the job fails, all parts are ended."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from penstock.launch.backends import BACKENDS, FAN_OUT, Job, ssh_words
from penstock.launch.messages import LOG
from penstock.launch.processes import Child, Events, Task, first_stdout
from penstock.launch.supervision import Patience, report, signals_to, supervise

_PROBE_S = 30.0  # time limit for an ssh probe
_REPORT_S = 10.0  # time for a node to report how it ended, and for its connection to close
_OF_THE_LAUNCHER = 255  # ssh's own exit code
_TASK_OF_SRUN = re.compile(
    r"^srun: error: [^:]+: tasks? [^:]+: (?:Exited with exit code (?P<code>\d+)|(?P<signal>[^(]+))"
)
# On SIGTERM, pdsh, mpirun and srun end their ranks. They do not end them when they are killed.
# mpirun also does not end them if a second SIGTERM follows soon. When the launcher dies, the kernel
# sends one death signal for each launcher thread. So this guard process runs in between. It passes
# on only the first SIGTERM, and its own death sends one SIGTERM.
_GUARD = """
import ctypes, os, signal, subprocess, sys
guard, told = os.getpid(), []
def tell(signum=None, frame=None):
    if not told:
        told.append(True)
        child.terminate()
def prepare():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(1)
early = []
signal.signal(signal.SIGTERM, lambda signum, frame: early.append(signum))
child = subprocess.Popen(sys.argv[1:], start_new_session=True, preexec_fn=prepare)
signal.signal(signal.SIGTERM, tell)
if early:
    tell()
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


def _probe(job: Job, hosts: Sequence[str]) -> list[str]:
    """Returns "HOST (reason)" for each host that ssh cannot log in to."""
    probes = {
        host: subprocess.Popen(
            [*ssh_words(job, host), "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    }
    problems = []
    end = time.monotonic() + _PROBE_S
    for host, probe in probes.items():
        try:
            _, said = probe.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.communicate()
            said = f"no answer within {_PROBE_S:g} s".encode()
        if probe.returncode != 0:
            why = said.decode(errors="replace").strip().splitlines()[-1:]
            problems.append(f"{host} ({''.join(why) or f'exit code {probe.returncode}'})")
    return problems


def check_ssh(job: Job) -> None:
    """Raises RuntimeError with the names of all nodes that ssh cannot log in to without a
    password."""
    names = [node.name for node in job.nodes]
    problems: list[str] = []
    for start in range(0, len(names), FAN_OUT):
        problems += _probe(job, names[start : start + FAN_OUT])
    if problems:
        raise RuntimeError(
            f"[launch::check_ssh] ssh without a password does not reach {'; '.join(problems)}. Set "
            f"up keys, exclude the hosts with --exclude, or skip this check with --no-ssh-check"
        )


def _is_known(host: str, *, alone: bool) -> bool:
    """Whether the name resolves to an address that other nodes can use.

    A loopback address is sufficient if the node is `alone`.
    """
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return alone or not all(str(one).startswith("127.") or one == "::1" for one in addresses)


def master_address(job: Job) -> str:
    """Returns an address of the first node that the other nodes can use.

    This is the node's name. But if only ssh knows the name, or it means a loopback address, the
    result is the first address that `hostname -I` prints on the node. Raises RuntimeError if it
    prints no address.
    """
    name = job.nodes[0].name
    host = name.rpartition("@")[2]
    if _is_known(host, alone=len(job.nodes) == 1):
        return host
    asked = subprocess.run(
        [*ssh_words(job, name), "hostname", "-I"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PROBE_S,
    )
    addresses = asked.stdout.split()
    if asked.returncode != 0 or not addresses:
        raise RuntimeError(
            f"[launch::master_address] the name {host} does not resolve to an address that other "
            f"nodes can use, and `hostname -I` on this host printed none ({asked.stderr.strip()}): "
            f"give --master-addr"
        )
    LOG.info(f"other nodes use the address {addresses[0]} for {host}")
    return addresses[0]


def _tasks(job: Job, launcher: str, vectors: Sequence[Sequence[str]]) -> list[Task]:
    backend = BACKENDS[launcher]
    if not backend.ends_with_stdin:
        argv = [sys.executable, "-I", "-S", "-c", _GUARD, *vectors[0]]
        # mpirun keeps the launcher's stderr, because a pipe would break when the launcher dies.
        # srun's stderr is copied, because srun names the task that failed first there.
        copied, end = launcher == "slurm", signal.SIGTERM
        return [Task(launcher, argv, os.environ, pipe_stderr=copied, death_signal=end)]
    tasks = []
    first_rank = 0
    for index, (node, vector) in enumerate(zip(job.nodes, vectors, strict=True)):
        task = Task(
            name=f"node {index} ({node.name})",
            argv=vector,
            env=os.environ,
            stdout="stderr" if index > 0 else first_stdout(len(job.nodes)),
            prefix_stdout=f"[rank {first_rank}] ".encode() if index > 0 else b"",
            ends_with_stdin=True,
        )
        first_rank += len(node.slots)
        tasks.append(task)
    return tasks


def _first_code_of_srun(lines: Sequence[bytes]) -> int:
    """Returns the exit code of the task that srun names first; 0 if it names none.

    srun itself returns the largest code, often from a task that srun ended.
    """
    for line in lines:
        match = _TASK_OF_SRUN.search(line.decode(errors="replace").rstrip())
        if match and match["code"]:
            return int(match["code"])
        if match and match["signal"].strip() in _SIGNALS:
            return 128 + _SIGNALS[match["signal"].strip()]
    return 0


def run_job(job: Job, launcher: str, patience: Patience) -> int:
    """Starts the job and waits until it ends.

    Returns 0, the exit code of the process that failed first, or 128 + signal if a signal stopped
    the launcher. Raises RuntimeError if the back end's program is not installed.
    """
    program = BACKENDS[launcher].program
    if shutil.which(program) is None:
        raise RuntimeError(
            f"[launch::run_job] --launcher {launcher} needs {program}, which is not installed here"
        )
    vectors = BACKENDS[launcher].vectors(job)
    for vector in vectors:
        LOG.debug(shlex.join(vector))
    events: Events = queue.SimpleQueue()
    children: list[Child] = []
    # A node may take all of its own time limit to end its ranks, and then needs time to report.
    patience = dataclasses.replace(patience, kill_s=patience.stop_s + _REPORT_S)
    with signals_to(events):
        try:
            for task in _tasks(job, launcher, vectors):
                children.append(Child(task))
                children[-1].watch(events)
            end = supervise(children, events, patience)
        finally:
            for child in children:
                if child.returncode is None:
                    child.reap()
    if end.failed is not None:
        code = report(end.failed)
        if launcher == "slurm":
            code = _first_code_of_srun(list(end.failed.tail)) or code
        if launcher == "ssh" and code == _OF_THE_LAUNCHER:
            LOG.error("ssh returns 255 if the connection fails or breaks")
        return code
    if end.stopped_by:
        LOG.warning(f"stopped by {signal.Signals(end.stopped_by).name}")
        return 128 + end.stopped_by
    return 0
