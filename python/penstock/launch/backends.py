"""Argument vectors that start a job on several nodes, one function for each back end.

ssh and pdsh start a `penstock run` on each node. MPI and Slurm start one task per rank, which reads
its rank from their environment variables (front/environment.py). ssh and pdsh pass a text to a
remote shell, with each word quoted; all other commands are argument vectors.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from penstock.launch.layout import Node, format_layout
from penstock.launch.options import AS_DEEPSPEED, RESUME, RankOptions

FAN_OUT = 1024  # simultaneous connections
# A lost host is noticed after a minute. BatchMode: no user is present to type a password.
_SSH = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=4")


@dataclasses.dataclass(frozen=True)
class Job:
    """The ranks of a job on several nodes, and how to reach the nodes."""

    command: Sequence[str]  # script and its arguments
    nodes: Sequence[Node]
    endpoint: str  # HOST:PORT of node 0
    env: Mapping[str, str]  # variables of this process that the nodes receive
    rank: RankOptions
    run_options: Sequence[str] = ()  # further options of each node's `penstock run`
    resume: str = "auto"
    ssh_port: int = 0  # 0: ssh's default
    launcher_args: Sequence[str] = ()
    ssh_args: Sequence[str] = ()  # arguments of every ssh call
    venv_script: str = ""  # sourced on each node first

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(len(node.slots) for node in self.nodes)

    def even(self, launcher: str) -> int:
        """Returns the number of ranks per node. Raises ValueError if the nodes differ."""
        counts = {node.name: len(node.slots) for node in self.nodes}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(
                f"[launch::backends] --launcher {launcher} needs the same number of ranks on each "
                f"node, but the numbers are {told}. Use pdsh, ssh or openmpi, or --num-gpus"
            )
        return len(self.nodes[0].slots)


def _node_words(job: Job, node_rank: str) -> list[str]:
    """Returns the command that runs on one node."""
    layout = format_layout([node.slots for node in job.nodes])
    place = ["--layout", layout, "--node-rank", node_rank, "--rdzv-endpoint", job.endpoint]
    run = [sys.executable, "-m", "penstock", "run", *place, *job.run_options]
    env = [f"{name}={value}" for name, value in sorted(job.env.items())]
    return ["env", *env, *run, "--end-with-stdin", *job.command]


def _text(words: Sequence[str], venv_script: str) -> str:
    """Returns the words as a command for a remote shell, run in this working directory."""
    first = f". {shlex.quote(os.path.abspath(venv_script))} && " if venv_script else ""
    return f"{first}cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def ssh_words(job: Job, host: str) -> list[str]:
    """Returns the ssh command for a host, without the remote command."""
    words = ["ssh", *(word for option in _SSH for word in ("-o", option))]
    words += ["-p", str(job.ssh_port)] if job.ssh_port else []
    return [*words, *job.ssh_args, host]


def ssh(job: Job) -> list[list[str]]:
    """Returns one ssh command per node."""
    return [
        [*ssh_words(job, node.name), _text(_node_words(job, str(index)), job.venv_script)]
        for index, node in enumerate(job.nodes)
    ]


def pdsh(job: Job) -> list[list[str]]:
    """Returns one pdsh command for all nodes. pdsh replaces %n by the number of the node."""
    place = "\0"
    text = _text(_node_words(job, place), job.venv_script).replace("%", "%%")
    given = [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), "-o BatchMode=yes"]
    ssh_args = " ".join(filter(None, [*given, f"-p {job.ssh_port}" if job.ssh_port else ""]))
    hosts = ",".join(node.name for node in job.nodes)
    return [
        [
            *("env", "PDSH_RCMD_TYPE=ssh", f"PDSH_SSH_ARGS_APPEND={ssh_args}"),
            *("pdsh", "-S", "-f", str(FAN_OUT), "-w", hosts, *job.launcher_args),
            text.replace(shlex.quote(place), "%n"),
        ]
    ]


def _task_env(job: Job, **beside: str) -> dict[str, str]:
    """Returns the environment variables for launchers that start one task per rank."""
    host, _, port = job.endpoint.rpartition(":")
    env = dict(job.env) | {RESUME: job.resume, "PYTHONUNBUFFERED": "1"} | beside
    if host:
        env |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    if job.rank.as_deepspeed:
        env[AS_DEEPSPEED] = "1"
    return env


def _with_env(env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Prefixes the command with `env` and the variables that differ from this process's."""
    new = [f"{k}={v}" for k, v in sorted(env.items()) if os.environ.get(k) != v]
    return ["env", *new, *words] if new else list(words)


def _given(job: Job, *names: str) -> bool:
    """Whether launcher_args has one of the options. A short option may include its value."""
    short = tuple(name for name in names if len(name) == 2)
    words = job.launcher_args
    return any(word.split("=")[0] in names or word.startswith(short) for word in words)


def _whole_slots(job: Job, launcher: str) -> None:
    for node in job.nodes:
        if node.slots != tuple(range(len(node.slots))):
            raise ValueError(
                f"[launch::backends] --launcher {launcher} cannot choose slots "
                f"{','.join(map(str, node.slots))} of {node.name}, only the number of slots: use "
                f"pdsh or ssh, or the first slots of each host"
            )


def openmpi(job: Job) -> list[list[str]]:
    """Returns Open MPI's mpirun. By default it would bind each rank to one core (--bind-to)."""
    _whole_slots(job, "openmpi")
    env = _task_env(job)
    hosts = ",".join(f"{node.name}:{len(node.slots)}" for node in job.nodes)
    words = ["mpirun", "-n", str(job.world_size), "--host", hosts]
    if not _given(job, "--bind-to", "-bind-to"):
        words += ["--bind-to", "none"]
    if job.ssh_port:
        words += ["--mca", "plm_rsh_args", f"-p {job.ssh_port}"]
    words += job.launcher_args
    for name in sorted(env):
        words += ["-x", name]
    return [_with_env(env, [*words, *job.rank.argv(job.command)])]


def _hydra(job: Job, launcher: str, **beside: str) -> list[list[str]]:
    """Returns the mpirun of MPICH and of its descendants."""
    _whole_slots(job, launcher)
    if job.ssh_port:
        raise ValueError(
            f"[launch::backends] --ssh-port with --launcher {launcher} is not supported: set the "
            f"port in ~/.ssh/config, or use openmpi, pdsh or ssh"
        )
    env = _task_env(job, **beside)
    each = job.even(launcher)
    hosts = ",".join(node.name for node in job.nodes)
    words = ["mpirun", "-n", str(job.world_size), "-ppn", str(each), "-hosts", hosts]
    words += [*job.launcher_args, "-genvlist", ",".join(sorted(env))]
    return [_with_env(env, [*words, *job.rank.argv(job.command)])]


def mpich(job: Job) -> list[list[str]]:
    """Returns MPICH's mpirun."""
    return _hydra(job, "mpich")


def impi(job: Job) -> list[list[str]]:
    """Returns Intel MPI's mpirun without its pinning of ranks to cores."""
    return _hydra(job, "impi", I_MPI_PIN="0")


def mvapich(job: Job) -> list[list[str]]:
    """Returns MVAPICH2's mpirun without its pinning of ranks to cores."""
    return _hydra(job, "mvapich", MV2_ENABLE_AFFINITY="0")


def slurm(job: Job) -> list[list[str]]:
    """Returns srun, which uses the current allocation or requests one.

    Slurm itself chooses the unnamed nodes. An empty `job.nodes` means all nodes of the allocation.
    """
    _whole_slots(job, "slurm")
    env = _task_env(job)
    words = ["srun"]
    if job.nodes:
        each = job.even("slurm")
        words += ["--nodes", str(len(job.nodes)), "--ntasks", str(job.world_size)]
        words += ["--ntasks-per-node", str(each)]
    names = [node.name for node in job.nodes if node.name]
    words += ["--nodelist", ",".join(names)] if names else []
    if not _given(job, "-K", "--kill-on-bad-exit"):
        words.append("--kill-on-bad-exit=1")
    words += [*job.launcher_args, "--export=ALL"]
    return [_with_env(env, [*words, *job.rank.argv(job.command)])]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to start a job."""

    program: str  # must be installed on this machine
    vectors: Callable[[Job], list[list[str]]]
    per_node: bool = False  # starts a `penstock run` on each node; else one task per rank
    ends_with_stdin: bool = False  # the remote command ends when its stdin closes


BACKENDS = {
    "pdsh": Backend("pdsh", pdsh, per_node=True),
    "ssh": Backend("ssh", ssh, per_node=True, ends_with_stdin=True),
    "openmpi": Backend("mpirun", openmpi),
    "mpich": Backend("mpirun", mpich),
    "impi": Backend("mpirun", impi),
    "mvapich": Backend("mpirun", mvapich),
    "slurm": Backend("srun", slurm),
}


def ssh_args(launcher: str, launcher_args: Sequence[str]) -> list[str]:
    """Returns the user's arguments for every ssh call; [] if the back end does not use ssh."""
    if launcher == "pdsh":
        return shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return list(launcher_args) if launcher == "ssh" else []


def choose(name: str) -> str:
    """Returns the back end in --launcher; by default pdsh if it is installed, else ssh.

    Raises ValueError for an unknown name.
    """
    if not name:
        return "pdsh" if shutil.which("pdsh") else "ssh"
    if name.lower() not in BACKENDS:
        raise ValueError(f"[launch::backends] --launcher {name}: allowed are {', '.join(BACKENDS)}")
    return name.lower()
