"""Options of the launch on this node. They are checked before a process is started."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence

from penstock.launch.cores import cores_of_ranks
from penstock.launch.layout import Slots

RESUME = "PENSTOCK_RESUME"  # environment variables of a rank
AS_DEEPSPEED = "PENSTOCK_AS_DEEPSPEED"


@dataclasses.dataclass(frozen=True)
class RankOptions:
    """How each rank is started.

    Raises ValueError if values contradict each other or `log_dir` is a file.
    """

    module: bool = False  # the script is the name of a module
    no_python: bool = False  # the script is a program
    as_deepspeed: bool = False  # set AS_DEEPSPEED and the variables of DeepSpeed's launcher
    local_rank: bool = False  # --local_rank=N is the script's first argument
    bind_cores: bool = False  # bind each rank to an equal part of the cores
    core_list: str = ""  # the cores to divide, such as "0-3,8"; default: all usable
    log_dir: str = ""  # folder for one output file per rank
    devices: Slots | None = None  # devices of the node that the ranks can see; None: all
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # additional variables

    def __post_init__(self) -> None:
        if self.module and self.no_python:
            raise ValueError(
                "[launch::options] --module needs Python, but --no-python is set: drop one of them"
            )
        if self.log_dir and pathlib.Path(self.log_dir).is_file():
            raise ValueError(
                f"[launch::options] --enable-each-rank-log {self.log_dir} is a file; give a folder"
            )

    def check_script(self, command: Sequence[str]) -> None:
        """Raises ValueError if the script or program does not exist."""
        script = command[0] if command else ""
        found = self.module or pathlib.Path(script).is_file()
        if not found and not (self.no_python and shutil.which(script)):
            raise ValueError(f"[launch::options] no such script: {script}")

    def argv(self, command: Sequence[str]) -> list[str]:
        """Returns the argument vector that runs the script with its arguments."""
        if self.no_python:
            return list(command)
        return [sys.executable, *(["-m"] if self.module else []), *command]

    def local_rank_at(self, command: Sequence[str]) -> int:
        """Returns the index in `argv` at which --local_rank=N is inserted; 0 for none."""
        return len(self.argv(command[:1])) if self.local_rank else 0

    def cores(self, nproc: int) -> list[Slots]:
        """Returns the cores of each rank of the node; [] if ranks are not bound.

        Raises ValueError if there are fewer cores than ranks.
        """
        return cores_of_ranks(nproc, self.core_list) if self.bind_cores or self.core_list else []


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to start on this node.

    Raises ValueError if a value is out of range, values contradict each other, or the script does
    not exist.
    """

    command: Sequence[str]  # script and its arguments
    nproc: int = 1  # ranks on this node
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""  # HOST:PORT of node 0; needed when nnodes > 1
    grace_s: float = 15.0  # time for the other ranks to end by themselves after a rank failed
    max_restarts: int = 0  # restarts after failures
    resume: str = "auto"  # what engine.load("auto") loads: "auto", "never" or a checkpoint
    min_nodes: int = 0  # if below nnodes, nodes may join and leave (elastic.py)
    ranks_on: Sequence[int] = ()  # number of ranks of each node; empty: nproc on each
    rank: RankOptions = dataclasses.field(default_factory=RankOptions)

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError("[launch::options] --max-restarts must not be negative")
        if self.nproc < 1 or self.nnodes < 1:
            raise ValueError("[launch::options] --nproc and --nnodes must be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"[launch::options] --node-rank must be 0 to {self.nnodes - 1}")
        if self.grace_s < 0:
            raise ValueError("[launch::options] --grace-s must not be negative")
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ValueError(
                "[launch::options] --nnodes above 1 needs --rdzv-endpoint HOST:PORT of node 0, or "
                "--master-addr HOST"
            )
        if self.ranks_on and (
            len(self.ranks_on) != self.nnodes or self.ranks_on[self.node_rank] != self.nproc
        ):
            raise ValueError("[launch::options] --layout must have a part for each node")
        self.rank.check_script(self.command)
        self.endpoint()

    @property
    def first_rank(self) -> int:
        """The lowest rank on this node."""
        if not self.ranks_on:
            return self.node_rank * self.nproc
        return sum(self.ranks_on[: self.node_rank])

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(self.ranks_on) if self.ranks_on else self.nnodes * self.nproc

    def endpoint(self) -> tuple[str, int]:
        """Returns host and port of the store. On a single node port 0 lets the kernel choose.

        Raises ValueError if `rdzv_endpoint` is not HOST:PORT.
        """
        if not self.rdzv_endpoint:
            return "127.0.0.1", 0
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"[launch::options] --rdzv-endpoint {self.rdzv_endpoint!r} is not HOST:PORT"
            )
        return host, int(port)
