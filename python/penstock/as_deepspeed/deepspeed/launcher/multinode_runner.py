"""The command lines of the launchers for several nodes, from penstock.launch.backends."""

from __future__ import annotations

import abc
import re
import shlex
import shutil
from typing import Any

from penstock.front.environment import DEFAULT_PORT
from penstock.launch import command
from penstock.launch.backends import BACKENDS, Job
from penstock.launch.layout import Node


class MultiNodeRunner(abc.ABC):
    """Makes a command line from the result of runner.parse_args().

    Attributes:
        exports: variables that the nodes receive.
    """

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Any = None) -> None:
        self.args, self.resource_pool = args, resource_pool
        self.world_info_base64 = world_info_base64
        self.user_arguments, self.user_script = self.parse_user_args(), args.user_script
        self.exports: dict[str, str] = {}

    def parse_user_args(self) -> list[str]:
        return list(self.args.user_args)

    def add_export(self, key: str, var: str) -> None:
        """Adds a variable. A value with characters that a shell treats specially is quoted."""
        plain = re.fullmatch(r"[\w@%+=:,./-]*", var.strip())
        self.exports[key.strip()] = var.strip() if plain else f'"{var.strip()}"'

    @abc.abstractmethod
    def backend_exists(self) -> Any:
        """Whether the launcher is installed on this machine."""

    @abc.abstractmethod
    def get_cmd(self, environment: Any, active_resources: Any) -> Any:
        """Returns the command line."""

    @property
    def name(self) -> str:
        return type(self).__name__


class _Runner(MultiNodeRunner):
    _launcher = ""

    @property
    def name(self) -> str:
        return self._launcher

    def backend_exists(self) -> Any:
        return shutil.which(BACKENDS[self._launcher].program)

    def _launcher_args(self) -> list[str]:
        return shlex.split(self.args.launcher_args)

    def get_cmd(self, environment: Any, active_resources: Any) -> Any:
        """Returns the command line. Sets the variables that it needs in `environment`.

        Args:
            active_resources: number or list of slots of each host.
        """
        pool = self.resource_pool or active_resources
        slots = {name: range(one) if isinstance(one, int) else one for name, one in pool.items()}
        nodes = [Node(name, tuple(one)) for name, one in slots.items()]
        args = self.args
        job = Job(
            command=[self.user_script, *self.user_arguments],
            nodes=nodes,
            endpoint=f"{args.master_addr or nodes[0].name}:{args.master_port or DEFAULT_PORT}",
            env=self.exports,
            rank=command.rank_options(args),
            run_options=command.run_options(args),
            ssh_port=args.ssh_port or 0,
            launcher_args=self._launcher_args(),
            venv_script=args.venv_script or "",
        )
        words = BACKENDS[self._launcher].vectors(job)[0]
        start = words.index(BACKENDS[self._launcher].program)
        environment.update(word.split("=", 1) for word in words[1:start])
        return words[start:]


class PDSHRunner(_Runner):
    _launcher = "pdsh"

    def get_cmd(self, environment: Any, active_resources: Any) -> Any:
        """Returns the command line, a command that does nothing (the ranks end with pdsh), and the
        environment."""
        return super().get_cmd(environment, active_resources), ["true"], environment


class OpenMPIRunner(_Runner):
    _launcher = "openmpi"

    def _launcher_args(self) -> list[str]:
        given = super()._launcher_args()  # the next line adds an interface, as DeepSpeed does
        link = [] if "btl_tcp_if_include" in given else ["--mca", "btl_tcp_if_include", "eth0"]
        return ["--mca", "btl", "^openib", *link, *given]


def _runner(name: str, launcher: str) -> type[_Runner]:
    return type(name, (_Runner,), {"_launcher": launcher, "__module__": __name__})


MPICHRunner = _runner("MPICHRunner", "mpich")
IMPIRunner = _runner("IMPIRunner", "impi")
SlurmRunner = _runner("SlurmRunner", "slurm")
MVAPICHRunner = _runner("MVAPICHRunner", "mvapich")
