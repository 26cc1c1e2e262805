"""A rank's place from Slurm's, MPI's, Kubeflow's, AzureML's and SageMaker's variables."""

from __future__ import annotations

import re

import pytest

from penstock import ConfigError
from penstock.front import environment

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_NPROCS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_NODELIST": "gpu[07-09,12-14]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1266286593",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1266286593",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
POD = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
# The training operator of Kubeflow 1: RANK is the pod's.
POD_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
}
AZURE = {
    "AZUREML_CR_NODE_RANK": "1",
    "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_TRAINING_ENV": "{}",
}
TORCHRUN = dict(zip(NAMES, ("2", "0", "4", "2", "node0"), strict=True)) | {"MASTER_PORT": "29500"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, "5 1 7 2 gpu07"),
        (SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, "6 0 7 1 gpu07"),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"), "5 1 7 2 gpu07"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "5 1 7 2 gpu07"),
        (SLURM | {"MASTER_ADDR": "10.1.1.1"}, "5 1 7 2 10.1.1.1"),
        (OPENMPI, "1 1 2 2 127.0.0.1"),
        (OPENMPI | SLURM, "1 1 2 2 127.0.0.1"),
        (
            OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
            "1 1 8 2 10.0.0.4",
        ),
        (
            OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.9"},
            "1 1 8 2 10.0.0.9",
        ),
        (OPENMPI | SAGEMAKER | {"OMPI_COMM_WORLD_SIZE": "8"}, "1 1 8 2 algo-1"),
        (HYDRA | {"MASTER_ADDR": "n1"}, "3 1 4 2 n1"),
        (HYDRA | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, "3 1 4 4 127.0.0.1"),
        (MVAPICH | {"MASTER_ADDR": "n1"}, "2 0 4 2 n1"),
        (POD, "2 0 3 1 job-node-0-0.job"),
        (POD_1, "1 0 2 1 job-master-0"),
        (AZURE, "1 0 2 1 10.0.0.4"),
        (SAGEMAKER, "1 0 2 1 algo-1"),
    ],
)
def test_a_place_is_found(environ, expected):
    environ = dict(environ)
    before = dict(environ)
    assert environment.adopt(environ)
    assert " ".join(environ[name] for name in NAMES) == expected
    assert 0 < int(environ["MASTER_PORT"]) < 65536
    assert environ.items() >= before.items()  # what was there has won


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCHRUN,
        TORCHRUN | SLURM | OPENMPI | POD,
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        without(SLURM, "SLURM_STEP_ID"),  # a batch script, of which there is one
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "2"},  # salloc
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        POD | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        SAGEMAKER | {"SM_HOSTS": '["algo-1"]'},
        AZURE | {"AZ_BATCH_HOST_LIST": "10.0.0.4"},
    ],
)
def test_nothing_is_made_up(environ):
    environ = dict(environ)
    before = dict(environ)
    assert not environment.adopt(environ)
    assert environ == before


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number >= 0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE=8 must not be above WORLD_SIZE=4",
        ),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 must be below SLURM_STEP_NUM_TASKS=7"),
        (SLURM | {"WORLD_SIZE": "4"}, "SLURM_PROCID=5 must be below WORLD_SIZE=4"),
        (
            without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            "SLURM_STEP_NUM_TASKS is missing. Set it, or WORLD_SIZE",
        ),
        (
            OPENMPI | {"OMPI_COMM_WORLD_SIZE": "8"},
            "OMPI_COMM_WORLD_SIZE=8 ranks are on several hosts and the host of rank 0 is unknown. "
            "Set MASTER_ADDR",
        ),
        (HYDRA, "PMI_SIZE=4 ranks are on several hosts and the host of rank 0 is unknown"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "PMI_RANK is set, but neither MPI_LOCALRANKID nor PALS_LOCAL_RANKID",
        ),
        (
            POD_1 | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},
            "this pod is one of PET_NNODES=2 with PET_NPROC_PER_NODE=4 ranks each, so RANK=1 is "
            "the pod's number, not a process's rank (LOCAL_RANK is missing)",
        ),
        (
            SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST=algo-3 is not in SM_HOSTS (algo-1, algo-2)",
        ),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is not a JSON list of hosts"),
    ],
)
def test_contradictions_name_their_variables(environ, message):
    with pytest.raises(ConfigError, match="^" + re.escape("[environment::adopt] " + message)):
        environment.adopt(dict(environ))


def test_a_job_has_one_port():
    def port(**changes):
        environ = SLURM | changes
        environment.adopt(environ)
        return int(environ["MASTER_PORT"])

    ports = {port(SLURM_JOB_ID=str(job)) for job in range(4700, 4720)}
    assert len(ports) == 20
    assert all(15000 <= one < 30000 for one in ports)
    assert port() == port(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0")
    assert port() != port(SLURM_STEP_ID="1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,7],other", "node01 node02 node03 node7 other"),
        ("a", "a"),
        ("a,b-1,c", "a b-1 c"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
    ],
)
def test_host_lists(text, names):
    assert environment.expand_hostlist(text) == names.split()


@pytest.mark.parametrize("text", ["", "a[1", "a1]", "a[x-y]", "a[1-2-3]", "a[]"])
def test_a_wrong_host_list_is_refused(text):
    with pytest.raises(ConfigError, match=r"^\[environment::expand_hostlist\]"):
        environment.expand_hostlist(text)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, (4, 2, "gpu07")),
        (POD, (3, 2, "job-node-0-0.job")),
        (POD_1, (2, 1, "job-master-0")),
        (AZURE | {"RANK": "1"}, (2, 1, "10.0.0.4")),
        (SAGEMAKER, (2, 1, "algo-1")),
        ({}, (0, -1, "")),
    ],
)
def test_the_place_of_a_node(environ, expected):
    place = environment.node_place(environ)
    assert (place.nodes, place.node_rank, place.master) == expected
