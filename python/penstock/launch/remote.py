"""Runs a job on several nodes: starts it there, and ends all of it when a part of it fails."""

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

_PROBE_S = 30.0  # for ssh to answer
_REPORT_S = 10.0  # for a node to say how it ended, and its connection to close
_OF_THE_LAUNCHER = 255  # ssh's own exit code
_TASK_OF_SRUN = re.compile(
    r"^srun: error: [^:]+: tasks? [^:]+: (?:Exited with exit code (?P<code>\d+)|(?P<signal>[^(]+))"
)
# pdsh, mpirun and srun take their ranks along on SIGTERM, not when they are killed, and mpirun not
# when a second SIGTERM comes soon. The kernel sends as many as we have threads when we die. So this
# stands between: it passes on the first one, and its own death is another.
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
    """What ssh says of those hosts that it cannot log in to."""
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
    """Raises RuntimeError that names every node which cannot be logged in to without a password."""
    names = [node.name for node in job.nodes]
    problems: list[str] = []
    for start in range(0, len(names), FAN_OUT):
        problems += _probe(job, names[start : start + FAN_OUT])
    if problems:
        raise RuntimeError(
            f"[launch::check_ssh] ssh without a password does not reach {'; '.join(problems)}. Set "
            f"up keys, take the hosts out by --exclude, or skip this check by --no-ssh-check"
        )


def _is_known(host: str, *, alone: bool) -> bool:
    """Whether the name has an address that serves the others too, if there are any."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return alone or not all(str(one).startswith("127.") or one == "::1" for one in addresses)


def master_address(job: Job) -> str:
    """An address of the first node for the others: its name, or where that is known to ssh alone
    or is this machine's loopback, the first one that `hostname -I` prints there."""
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
            f"[launch::master_address] {host} has no address that other nodes know, and `hostname "
            f"-I` there gave none ({asked.stderr.strip()}): give --master-addr"
        )
    LOG.info(f"{host} is {addresses[0]} for the other nodes")
    return addresses[0]


def _tasks(job: Job, launcher: str, vectors: Sequence[Sequence[str]]) -> list[Task]:
    backend = BACKENDS[launcher]
    if not backend.ends_with_stdin:
        argv = [sys.executable, "-I", "-S", "-c", _GUARD, *vectors[0]]
        # On our death a pipe would break under mpirun. Of srun we read the first failure.
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
    """The code of the task that srun names first: its own is the largest one, which is often that
    of a task which it ended. 0 when it names none."""
    for line in lines:
        match = _TASK_OF_SRUN.search(line.decode(errors="replace").rstrip())
        if match and match["code"]:
            return int(match["code"])
        if match and match["signal"].strip() in _SIGNALS:
            return 128 + _SIGNALS[match["signal"].strip()]
    return 0


def run_job(job: Job, launcher: str, patience: Patience) -> int:
    """Starts the job and waits for its end. Returns 0, or the exit code of what failed first, or
    128 + signal when we were told to stop."""
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
    # A node needs its own patience to end, and then time to say so.
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
            LOG.error("255 is what ssh ends with when the connection fails or breaks")
        return code
    if end.stopped_by:
        LOG.warning(f"stopped by {signal.Signals(end.stopped_by).name}")
        return 128 + end.stopped_by
    return 0
