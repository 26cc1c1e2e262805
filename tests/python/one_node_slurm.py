"""A Slurm of one node on this machine: munged, slurmctld and slurmd, all files in one folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

from ports import free_ports

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
_CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES State=UP
"""


class CannotRun(RuntimeError):
    """Slurm did not come up; says why."""


def why_not() -> str:
    """Why it cannot be tried here; empty when it can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _start(folder: pathlib.Path, *words: str) -> subprocess.Popen[bytes]:
    program = shutil.which(words[0], path=_PATH) or words[0]
    log = open(folder / f"{words[0]}.out", "wb")
    with log:
        return subprocess.Popen([program, *words[1:]], stdout=log, stderr=log, cwd=folder)


def _wait_until_idle(folder: pathlib.Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 120
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    words = ["sinfo", "--noheader", "--format=%t"]
    while True:
        said = subprocess.run(words, capture_output=True, text=True, env=env).stdout
        if said.strip() == "idle":
            return
        dead = any(daemon.poll() is not None for daemon in daemons)
        if dead or time.monotonic() > deadline:
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in _logs(folder)}
            raise CannotRun(f"the node is {said.strip() or 'unknown'!r}; {logs}")
        time.sleep(0.05)


def _logs(folder: pathlib.Path) -> list[pathlib.Path]:
    return [*folder.glob("*.out"), *folder.glob("*.log")]


@contextlib.contextmanager
def one_node_slurm() -> Iterator[dict[str, str]]:
    """The environment in which srun finds it. Raises CannotRun with the daemons' logs."""
    daemons: list[subprocess.Popen[bytes]] = []
    # A socket's path is short, and munged wants a folder that others may enter.
    with tempfile.TemporaryDirectory(prefix="slurm") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        config = _CONFIG.format(folder=folder, host=socket.gethostname(), ports=free_ports(2))
        (folder / "slurm.conf").write_text(config, encoding="ascii")
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
        files["seed-file"] = "seed"
        munge = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        conf = ["-f", str(folder / "slurm.conf")]
        try:
            daemons.append(_start(folder, "munged", "--force", "--foreground", *munge))
            while not (folder / "munge.socket").exists() and daemons[0].poll() is None:
                time.sleep(0.01)
            daemons.append(_start(folder, "slurmctld", "-D", *conf))
            daemons.append(_start(folder, "slurmd", "-D", "-N", "localhost", *conf))
            _wait_until_idle(folder, daemons)
            yield {"SLURM_CONF": str(folder / "slurm.conf")}
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
