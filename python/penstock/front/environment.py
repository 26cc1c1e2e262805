"""Finds a process's place among the ranks, for each launcher and scheduler.

torchrun and `penstock run` set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. `adopt` fills them from the variables of Slurm, MPI, Kubeflow, AzureML and SageMaker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping

from penstock._native import ConfigError

DEFAULT_PORT = 29500
_PORTS = range(15000, 30000)  # below the kernel's ephemeral ports
_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process, read from a scheduler's variables."""

    names: Mapping[str, str]  # torchrun's variable -> the scheduler's variable for it
    values: Mapping[str, str]  # torchrun's variable -> value; MASTER_ADDR only if known
    job: str = ""  # identifies the job: the same on all its ranks


@dataclasses.dataclass(frozen=True)
class NodePlace:
    """The place of this node, for a launcher that runs once on each node."""

    nodes: int = 0  # 0: unknown
    node_rank: int = -1  # -1: unknown
    master: str = ""
    port: int = DEFAULT_PORT


def expand_hostlist(text: str) -> list[str]:
    """Returns the host names of a Slurm host list.

    node[01-03,7],other gives node01 node02 node03 node7 other. Raises ConfigError for any other
    text.
    """
    names = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names += _expand(part, text)
    if not names or text.count("[") != text.count("]"):
        raise ConfigError(f"[environment::expand_hostlist] {text!r} is not a list of hosts")
    return names


def _expand(part: str, text: str) -> list[str]:
    """Returns the host names of `part`, one element of the list `text`."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    names = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            raise ConfigError(
                f"[environment::expand_hostlist] {piece!r} in {text!r} is not a range of numbers"
            )
        first, last = match[1], match[2] or match[1]
        numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        names += [head + number + end for number in numbers for end in _expand(tail, text)]
    return names


def _port(job: str) -> str:
    """Returns a port computed from the job's id, so that all its ranks agree."""
    return str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else DEFAULT_PORT)


def _place(environ: Environ, names: dict[str, str], job: str = "", master: str = "") -> Place:
    values = {ours: environ[theirs] for ours, theirs in names.items() if theirs in environ}
    if master:
        values["MASTER_ADDR"] = master
    return Place(names, values, job)


def _hosts_of_sagemaker(environ: Environ) -> list[str]:
    try:
        return [str(host) for host in json.loads(environ.get("SM_HOSTS", "[]"))]
    except ValueError:
        raise ConfigError("[environment::adopt] SM_HOSTS is not a JSON list of hosts") from None


def _master_of_cloud(environ: Environ) -> str:
    """Returns the host of rank 0 on AzureML or SageMaker, "" elsewhere."""
    azure = environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0]
    return (
        azure
        or environ.get("AZ_BATCHAI_MPI_MASTER_NODE", "")
        or environ.get("SM_MASTER_ADDR", "")
        or "".join(_hosts_of_sagemaker(environ)[:1])
    )


def _openmpi(environ: Environ) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE", "")
    return _place(environ, names, job, _master_of_cloud(environ))


def _mvapich(environ: Environ) -> Place | None:
    if "MV2_COMM_WORLD_RANK" not in environ:
        return None
    names = {
        "RANK": "MV2_COMM_WORLD_RANK",
        "LOCAL_RANK": "MV2_COMM_WORLD_LOCAL_RANK",
        "WORLD_SIZE": "MV2_COMM_WORLD_SIZE",
        "LOCAL_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_SIZE",
    }
    return _place(environ, names, master=_master_of_cloud(environ))


def _pmi(environ: Environ) -> Place | None:
    """MPICH and Intel MPI. Slurm also sets PMI_RANK, but not the rank on the host."""
    local = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "LOCAL_RANK")
    found = [name for name in local if name in environ]
    if "PMI_RANK" not in environ or ("SLURM_PROCID" in environ and not found):
        return None
    if not found and environ.get("PMI_SIZE") == "1":
        return None  # a single process
    if not found:
        raise ConfigError(
            "[environment::adopt] PMI_RANK is set, but neither MPI_LOCALRANKID nor "
            "PALS_LOCAL_RANKID is, so the rank on the host is unknown. Set LOCAL_RANK"
        )
    names = {
        "RANK": "PMI_RANK",
        "LOCAL_RANK": found[0],
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    }
    return _place(environ, names, master=_master_of_cloud(environ))


def _slurm(environ: Environ) -> Place | None:
    """A task of srun. A batch script also has SLURM_PROCID, but no SLURM_STEP_ID."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    names = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": next((name for name in sizes if name in environ), sizes[0]),
    }
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    hosts = _hosts_of_slurm(environ)
    place = _place(environ, names, job, hosts[0] if hosts else "")
    if tasks := _tasks_here(environ):
        return dataclasses.replace(place, values={**place.values, "LOCAL_WORLD_SIZE": tasks})
    return place


def _hosts_of_slurm(environ: Environ) -> list[str]:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_hostlist(environ[name])
    return []


def _tasks_here(environ: Environ) -> str:
    """Returns the number of this step's tasks on this node, "" if unknown. Parses 2(x3),1."""
    counts: list[str] = []
    for piece in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        counts += [match[1]] * int(match[2] or 1) if match else []
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else ""


def _one_process_a_node(nodes: int, node_rank: int, master: str, names: dict[str, str]) -> Place:
    values = {
        "RANK": str(node_rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
    }
    return Place(names, {name: value for name, value in values.items() if value})


def _kubeflow(environ: Environ) -> Place | None:
    """A pod. RANK is the number of the pod. If a pod has only one process, this number is the
    process's rank."""
    if "PET_NNODES" not in environ or "LOCAL_RANK" in environ:
        return None
    nodes, each = environ["PET_NNODES"], environ.get("PET_NPROC_PER_NODE", "1")
    if each == "1" or environ.get("WORLD_SIZE") == nodes:
        rank = environ.get("RANK", environ.get("PET_NODE_RANK", "0"))
        found = _one_process_a_node(
            _number("PET_NNODES", nodes),
            _number("PET_NODE_RANK", rank),
            environ.get("PET_MASTER_ADDR", ""),
            {"RANK": "PET_NODE_RANK", "WORLD_SIZE": "PET_NNODES"},
        )
        port = environ.get("PET_MASTER_PORT", "")
        return dataclasses.replace(
            found, values={**found.values, **({"MASTER_PORT": port} if port else {})}
        )
    if nodes == "1" and not each.isdecimal() and "RANK" not in environ:
        return None  # a single process on one node
    raise ConfigError(
        f"[environment::adopt] this pod is one of PET_NNODES={nodes} with PET_NPROC_PER_NODE={each}"
        f" ranks each, so RANK={environ.get('RANK', '')} is the pod's number, not a process's rank "
        f"(LOCAL_RANK is missing). Start the script with `penstock run` or torchrun"
    )


def _azure(environ: Environ) -> Place | None:
    hosts = environ.get("AZ_BATCH_HOST_LIST", "").split(",")
    if "AZUREML_CR_NODE_RANK" not in environ or len(hosts) < 2 or "RANK" in environ:
        return None
    names = {"RANK": "AZUREML_CR_NODE_RANK", "WORLD_SIZE": "AZ_BATCH_HOST_LIST"}
    rank = _number("AZUREML_CR_NODE_RANK", environ["AZUREML_CR_NODE_RANK"])
    return _one_process_a_node(len(hosts), rank, _master_of_cloud(environ) or hosts[0], names)


def _sagemaker(environ: Environ) -> Place | None:
    hosts = _hosts_of_sagemaker(environ)
    here = environ.get("SM_CURRENT_HOST", "")
    if len(hosts) < 2 or "RANK" in environ:
        return None
    if here not in hosts:
        raise ConfigError(
            f"[environment::adopt] SM_CURRENT_HOST={here} is not in SM_HOSTS ({', '.join(hosts)})"
        )
    names = {"RANK": "SM_CURRENT_HOST", "WORLD_SIZE": "SM_HOSTS"}
    return _one_process_a_node(len(hosts), hosts.index(here), _master_of_cloud(environ), names)


# MPI comes before Slurm: if Slurm started mpirun, Slurm's variables describe the daemons of MPI.
_SOURCES: tuple[Callable[[Environ], Place | None], ...] = (
    _openmpi,
    _mvapich,
    _pmi,
    _slurm,
    _kubeflow,
    _azure,
    _sagemaker,
)


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"[environment::adopt] {name}={text!r} is not a whole number >= 0")
    return int(text)


def _check(values: Environ, told: Callable[[str], str]) -> None:
    """Raises ConfigError if the values contradict each other. `told` names the source of each."""
    numbers = {name: _number(told(name), values[name]) for name in _OURS[:4] if name in values}
    for low, high in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if low in numbers and high in numbers and numbers[low] >= numbers[high]:
            raise ConfigError(
                f"[environment::adopt] {told(low)}={numbers[low]} must be below "
                f"{told(high)}={numbers[high]}"
            )
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", 1 << 62):
        raise ConfigError(
            f"[environment::adopt] {told('LOCAL_WORLD_SIZE')}={numbers['LOCAL_WORLD_SIZE']} must "
            f"not be above {told('WORLD_SIZE')}={numbers['WORLD_SIZE']}"
        )


def _master(merged: dict[str, str], place: Place, told: Callable[[str], str]) -> None:
    """Adds the address and port of rank 0. If all ranks are on this host, the address is 127.0.0.1.
    Raises ConfigError if ranks are on several hosts and the address is unknown."""
    if merged["WORLD_SIZE"] == merged.get("LOCAL_WORLD_SIZE", "1"):
        merged.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in merged:
        raise ConfigError(
            f"[environment::adopt] {told('WORLD_SIZE')}={merged['WORLD_SIZE']} ranks are on "
            f"several hosts and the host of rank 0 is unknown. Set MASTER_ADDR to that host (and "
            f"MASTER_PORT, default {DEFAULT_PORT})"
        )
    merged.setdefault("MASTER_PORT", _port(place.job))


def adopt(environ: MutableMapping[str, str] | None = None) -> bool:
    """Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the
    scheduler's variables. If one of them is already set, it does not change.

    Args:
        environ: the variables to read and fill; default: `os.environ`.

    Returns:
        True if a scheduler was found.

    Raises:
        ConfigError: if values contradict each other, or the host of rank 0 is unknown. The
            error names the variables.
    """
    environ = os.environ if environ is None else environ
    given = {name: environ[name] for name in _OURS if environ.get(name)}
    place = None
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= set(given):
        found = (source(environ) for source in _SOURCES)
        place = next((one for one in found if one is not None), None)
    if place is None:
        _check(given, str)
        return False

    def told(name: str) -> str:
        return name if name in given or place is None else place.names.get(name, name)

    merged = {**place.values, **given}
    for name in ("RANK", "WORLD_SIZE"):
        if name not in merged:
            raise ConfigError(f"[environment::adopt] {told(name)} is missing. Set it, or {name}")
    _check(merged, told)
    _master(merged, place, told)
    environ.update({name: value for name, value in merged.items() if name not in given})
    return True


def node_place(environ: Environ) -> NodePlace:
    """Returns this node's number and the address of node 0, for a launcher that runs once on each
    node. Fields that the cluster does not set keep their defaults."""
    hosts = _hosts_of_slurm(environ)
    if "SLURM_NODEID" in environ and hosts:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        rank = _number("SLURM_NODEID", environ["SLURM_NODEID"])
        return NodePlace(len(hosts), rank, hosts[0], int(_port(job)))
    if "PET_NNODES" in environ:
        port = environ.get("PET_MASTER_PORT") or str(DEFAULT_PORT)
        nodes = environ["PET_NNODES"]
        return NodePlace(
            int(nodes) if nodes.isdecimal() else 0,  # a range such as 1:4
            _number("PET_NODE_RANK", environ.get("PET_NODE_RANK") or environ.get("RANK", "0")),
            environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", ""),
            _number("PET_MASTER_PORT", port),
        )
    for source in (_azure, _sagemaker):
        place = source({name: value for name, value in environ.items() if name != "RANK"})
        if place is not None:
            values = place.values
            nodes_and_rank = int(values["WORLD_SIZE"]), int(values["RANK"])
            return NodePlace(*nodes_and_rank, values.get("MASTER_ADDR", ""))
    return NodePlace()
