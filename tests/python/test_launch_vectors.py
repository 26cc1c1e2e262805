"""What `penstock run --dry-run` and `deepspeed --dry-run` print: the argument vectors of every back
end, and the errors of options that do not fit each other."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import sys

import pytest

from penstock import cli
from penstock.launch import arguments, backends, command, remote
from penstock.launch.layout import Node
from penstock.launch.options import RankOptions

ODD = ["two words", "a'b\"c", "$HOME;echo no", "%h", "--num_gpus"]
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15".split()
SSH += ["-o", "ServerAliveCountMax=4"]
RUN_OPTIONS = "--grace-s 15.0 --resume auto --max-restarts 0".split()
SCHEDULERS = ("SLURM_", "PET_", "OMPI_", "PMI", "AZ", "SM_", "DS_ENV")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with hostfiles, a home without any, and an environment with little in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in list(os.environ):
        if name.startswith((*backends_prefixes(), *SCHEDULERS, "CUDA_", "PDSH_", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "a b;$c")
    (tmp_path / "hosts").write_text("b slots=2\na slots=4\nme@c slots=2\n", encoding="utf-8")
    (tmp_path / "even").write_text("b slots=2\na slots=2\n", encoding="utf-8")
    (tmp_path / "one").write_text("b slots=2\n", encoding="utf-8")
    (tmp_path / "train.py").touch()
    return tmp_path


def backends_prefixes():
    return ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "GLOO", "PENSTOCK")


@pytest.fixture
def dry(capsys):
    """The vectors that a command line would start."""

    def dry(*words: str, main=None) -> list[list[str]]:
        words = ("--dry-run", *words)
        code = main(words) if main else cli.main(["run", *words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return [shlex.split(line) for line in out.splitlines()]

    return dry


@pytest.fixture
def refused(capsys):
    """The one line that a command line is refused with."""

    def refused(*words: str, main=None) -> str:
        code = main(["--dry-run", *words]) if main else cli.main(["run", "--dry-run", *words])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        return err.strip()

    return refused


def remote_words(folder, layout, node, *options, script=("train.py",)):
    env = ["NCCL_DEBUG=a b;$c", f"PYTHONPATH={folder}"]
    place = ["--layout", layout, "--node-rank", node, "--rdzv-endpoint", "b:29500"]
    run = [sys.executable, "-m", "penstock", "run", *place, *RUN_OPTIONS, *options]
    return ["env", *env, *run, "--log-level", "info", "--end-with-stdin", *script]


def test_ssh(dry, place):
    vectors = dry("-H", "hosts", "--launcher", "ssh", "--num-nodes", "2", "train.py", *ODD)
    assert [vector[:-1] for vector in vectors] == [[*SSH, "b"], [*SSH, "a"]]
    for node, vector in enumerate(vectors):
        text = vector[-1]
        words = remote_words(place, "0-1@0-3", str(node), script=("train.py", *ODD))
        assert text == f"cd {place} && exec {shlex.join(words)}"


def test_ssh_options(dry, place):
    options = ["--ssh_port", "2222", "--launcher_args", "-F 'a b'", "--include", "me@c:1@a:0,3"]
    options += ["--master_addr", "10.0.0.1", "--master_port", "1234", "--venv_script", "v/activate"]
    first, second = dry("--hostfile", "hosts", "--launcher", "SSH", *options, "train.py")
    assert first[:-1] == [*SSH, "-p", "2222", "-F", "a b", "a"]
    assert second[:-1] == [*SSH, "-p", "2222", "-F", "a b", "me@c"]
    assert second[-1].startswith(f". {place}/v/activate && cd {place} && exec env ")
    assert "--layout 0,3@1 --node-rank 1 --rdzv-endpoint 10.0.0.1:1234 " in second[-1]


def test_pdsh(dry, place):
    words = (
        "-H",
        "hosts",
        "--launcher",
        "pdsh",
        "-e",
        "me@c",
        "--ssh_port",
        "22",
        "train.py",
        *ODD,
    )
    (vector,) = dry(*words)
    start = ["env", "PDSH_RCMD_TYPE=ssh", "PDSH_SSH_ARGS_APPEND=-o BatchMode=yes -p 22"]
    assert vector[:-1] == [*start, "pdsh", "-S", "-f", "1024", "-w", "b,a"]
    remote = remote_words(place, "0-1@0-3", "%n", script=("train.py", *ODD))
    words = [word if word == "%n" else word.replace("%", "%%") for word in remote]
    assert shlex.split(vector[-1].partition(" && exec ")[2]) == words
    assert " --node-rank %n " in vector[-1]


MPI_ENV = "MASTER_ADDR MASTER_PORT NCCL_DEBUG PENSTOCK_RESUME PYTHONPATH PYTHONUNBUFFERED".split()


def mpi_env(folder, *beside: str) -> list[str]:
    values = ["MASTER_ADDR=b", "MASTER_PORT=29500", "PENSTOCK_RESUME=auto", f"PYTHONPATH={folder}"]
    return ["env", *sorted([*values, "PYTHONUNBUFFERED=1", *beside])]


def test_openmpi(dry, place):
    args = "--mca btl_tcp_if_include eth0"
    words = ("--launcher", "openmpi", "--launcher_args", args, "train.py", *ODD)
    (vector,) = dry("-H", "hosts", *words)
    hosts = ["mpirun", "-n", "8", "--host", "b:2,a:4,me@c:2", "--bind-to", "none"]
    exports = [word for name in MPI_ENV for word in ("-x", name)]
    script = [sys.executable, "train.py", *ODD]
    assert vector == [*mpi_env(place), *hosts, *args.split(), *exports, *script]
    (vector,) = dry("-H", "one", "--force_multi", "--ssh_port", "9", *words)
    assert ["--mca", "plm_rsh_args", "-p 9"] == vector[vector.index("none") + 1 :][:3]
    (vector,) = dry("-H", "hosts", *words[:2], "--launcher-args=--bind-to core", "train.py")
    assert vector.count("--bind-to") == 1


@pytest.mark.parametrize(
    ("launcher", "beside"),
    [("mpich", ""), ("impi", "I_MPI_PIN=0"), ("mvapich", "MV2_ENABLE_AFFINITY=0")],
)
def test_hydra(launcher, beside, dry, place):
    words = ("--launcher", launcher, "--launcher_args=-print-all", "-m", "pack.train", *ODD)
    (vector,) = dry("-H", "even", *words)
    names = sorted([*MPI_ENV, *filter(None, [beside.partition("=")[0]])])
    assert vector == [
        *mpi_env(place, *filter(None, [beside])),
        *("mpirun", "-n", "4", "-ppn", "2", "-hosts", "b,a", "-print-all"),
        *("-genvlist", ",".join(names), sys.executable, "-m", "pack.train", *ODD),
    ]


def test_slurm(dry, place):
    (vector,) = dry("-H", "even", "--launcher", "slurm", "--no_python", "ls", *ODD)
    env = [f"PYTHONPATH={place}", "PYTHONUNBUFFERED=1"]
    tasks = "srun --nodes 2 --ntasks 4 --ntasks-per-node 2 --nodelist b,a --kill-on-bad-exit=1"
    assert vector == [
        *("env", "PENSTOCK_RESUME=auto", *env),
        *(*tasks.split(), "--export=ALL", "ls", *ODD),
    ]


def test_slurm_without_a_hostfile(dry):
    start = ("--launcher", "slurm", "--launcher_args", "-K0 --partition=big")
    for options, expected in {
        (): "srun -K0 ",
        ("--num_nodes", "3"): "srun --nodes 3 --ntasks 3 --ntasks-per-node 1 -K0 ",
        ("--num_gpus", "4"): "srun --nodes 1 --ntasks 4 --ntasks-per-node 4 -K0 ",
        ("--num_nodes", "2", "--num_gpus", "4"): "srun --nodes 2 --ntasks 8 --ntasks-per-node 4 ",
    }.items():
        (vector,) = dry(*start, *options, "train.py")
        assert expected in shlex.join(vector)
    (vector,) = dry(*start, "--master_addr", "x", "train.py")
    assert {"MASTER_ADDR=x", "MASTER_PORT=29500"} < set(vector)


def test_what_is_said_again_on_the_nodes(dry, place):
    (place / ".deepspeed_env").write_text("FROM=here\nNCCL_DEBUG=0\n", encoding="utf-8")
    (place / "home").mkdir()
    (place / "home" / ".deepspeed_env").write_text("FROM=home\nHOME_ONLY=1\n", encoding="utf-8")
    (place / "mine").write_text("HOME_ONLY=2\n", encoding="utf-8")
    options = "--env-file mine --as-deepspeed --no_local_rank --module --bind_cores_to_rank"
    options += " --bind_core_list 0-3 --enable_each_rank_log logs --elastic_training --grace-s 3"
    options += " --min_elastic_nodes 1 --log_level error --max-restarts 7 --resume never"
    first, _ = dry("-H", "even", "--launcher", "ssh", *options.split(), "pack.train")
    text = first[-1].partition(" && exec ")[2]
    env = ["FROM=here", "HOME_ONLY=2", "NCCL_DEBUG=0", f"PYTHONPATH={place}"]
    assert shlex.split(text)[:5] == ["env", *env]
    said = "--grace-s 3.0 --resume never --max-restarts 7 --module --bind-cores-to-rank"
    said += " --as-deepspeed --no-local-rank --elastic-training --bind-core-list 0-3"
    said += " --enable-each-rank-log logs --log-level error --min-elastic-nodes 1"
    assert text.endswith(f"{said} --end-with-stdin pack.train")


def test_the_default_back_end(monkeypatch):
    monkeypatch.setattr(backends.shutil, "which", lambda name: f"/bin/{name}")
    assert backends.choose("") == "pdsh"
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    assert backends.choose("") == "ssh"
    job = backends.Job(["x"], [Node("a", (0,))], "a:1", {}, RankOptions())
    with pytest.raises(
        RuntimeError, match="--launcher openmpi needs mpirun, which is not installed"
    ):
        remote.run_job(job, "openmpi", remote.Patience(1.0))


def world(rank, local_rank, size, local_size, *master):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    values = (rank, local_rank, size, local_size, *(master or ("127.0.0.1",)))
    return [f"{name}={value}" for name, value in zip(names, values, strict=False)]


def test_this_machine(dry):
    script = [sys.executable, "train.py", *ODD]
    assert dry("train.py", *ODD) == [["env", *world(0, 0, 1, 1), *script]]
    assert dry("--nproc", "2", "train.py", *ODD) == [
        ["env", *world(rank, rank, 2, 2), *script] for rank in range(2)
    ]
    devices = "CUDA_VISIBLE_DEVICES=0,1"
    assert dry("--num_gpus=2", "--master_port", "7", "train.py", *ODD) == [
        ["env", devices, *world(rank, rank, 2, 2, "127.0.0.1", 7), *script] for rank in range(2)
    ]


def test_one_of_several_nodes(dry):
    """Each started by itself: by counts, by a layout, and by the hostfile without ssh."""
    script = [sys.executable, "train.py"]
    (vector,) = dry(*"--nnodes 2 --node_rank 1 --master_addr b --master_port 5 train.py".split())
    assert vector == ["env", *world(1, 0, 2, 1, "b", 5), *script]
    words = "--layout 0@3,5 --node-rank 1 --rdzv-endpoint b:5 train.py"
    both = [world(rank + 1, rank, 3, 2, "b", 5) for rank in range(2)]
    devices = ["env", "CUDA_VISIBLE_DEVICES=3,5"]
    assert dry(*words.split()) == [[*devices, *one, *script] for one in both]
    words = "-H hosts --include b:0@a:3,5 --no_ssh --node_rank 1 --master_port 5 train.py"
    assert "a slots=4" in open("hosts", encoding="utf-8").read()
    words = words.replace("3,5", "1,3")
    devices = ["env", "CUDA_VISIBLE_DEVICES=1,3"]
    assert dry(*words.split()) == [[*devices, *one, *script] for one in both]


def test_one_host_is_started_here(dry):
    vectors = dry("-H", "one", "train.py")
    assert [vector[:2] for vector in vectors] == [["env", "CUDA_VISIBLE_DEVICES=0,1"]] * 2
    (vector, *_) = dry("-H", "one", "--force_multi", "--launcher", "ssh", "train.py")
    assert vector[: len(SSH) + 1] == [*SSH, "b"]


def test_the_cluster_says_which_node_this_is(dry, monkeypatch):
    slurm = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    (vector,) = dry("--nnodes", "2", "--master_port", "5", "train.py")
    assert vector[1:-2] == world(1, 0, 2, 1, "n1", 5)
    for name in slurm:
        monkeypatch.delenv(name)
    pod = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "1", "MASTER_ADDR": "pod-0"}
    for name, value in pod.items():
        monkeypatch.setenv(f"PET_{name}", value)
    vectors = dry("train.py")
    assert [v[1:-2] for v in vectors] == [world(2 + n, n, 4, 2, "pod-0", 29500) for n in range(2)]


def test_deepspeed(dry):
    told = ["CUDA_VISIBLE_DEVICES=0,1", "PENSTOCK_AS_DEEPSPEED=1"]
    for main, first in ((command.deepspeed_main, []), (None, ["--as-deepspeed"])):
        vectors = dry(*first, "--num_gpus", "2", "train.py", "--x", main=main)
        assert vectors == [
            [
                "env",
                *told,
                *world(n, n, 2, 2),
                sys.executable,
                "train.py",
                f"--local_rank={n}",
                "--x",
            ]
            for n in range(2)
        ]
        (vector,) = dry(*first, "--no_local_rank", "train.py", main=main)
        assert vector == ["env", told[1], *world(0, 0, 1, 1), sys.executable, "train.py"]
        (vector,) = dry(*first, "--module", "pack", "--x", main=main)
        assert vector[-5:] == [sys.executable, "-m", "pack", "--local_rank=0", "--x"]
        (vector,) = dry(*first, "--no_python", "ls", "--x", main=main)
        assert vector[-3:] == ["ls", "--local_rank=0", "--x"]


def test_deepspeed_goes_on_with_a_warning(capsys):
    words = ["--hostfile", "none", "--launcher", "pdsh", "--ssh_port", "4", "--dry-run", "train.py"]
    assert command.deepspeed_main(words) == 0
    assert capsys.readouterr().err.splitlines() == [
        "penstock run: there is no hostfile none: only this machine is used",
        "penstock run: --launcher, --ssh-port has no effect without a hostfile",
    ]


MULTI = "-H hosts train.py"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hostfile none train.py", "[launch::hostfile] cannot read the hostfile none: "),
        (
            f"-i d {MULTI}",
            "[launch::select] --include d: there is no host 'd'; allowed are b, a, me@c",
        ),
        (f"-i b -e a {MULTI}", "[launch::select] --include and --exclude are both given"),
        (
            f"-i b --num_gpus 1 --num_nodes 2 {MULTI}",
            "[launch::command] --num-nodes, --num-gpus cannot be combined with --include or",
        ),
        (
            f"--num_nodes 4 {MULTI}",
            "[launch::first] --num-nodes 4: there are only 3 hosts (b, a, me@c)",
        ),
        (f"--num_nodes 0 {MULTI}", "[launch::command] --num-nodes must be at least 1"),
        (f"--num_gpus 3 {MULTI}", "[launch::first] --num-gpus 3: b has only slots=2 (hosts:1)"),
        ("--num_nodes 2 train.py", "[launch::command] --num-nodes 2 needs a --hostfile"),
        (
            "-i a train.py",
            "[launch::select] --include a: there is no host 'a'; allowed are localhost",
        ),
        (
            f"--launcher lsf {MULTI}",
            "[launch::backends] --launcher lsf: allowed are pdsh, ssh, openmpi, mpich, impi, "
            "mvapich, slurm",
        ),
        (
            f"--launcher mpich {MULTI}",
            "[launch::backends] --launcher mpich needs the same number of ranks on each node, but "
            "the numbers are b: 2, a: 4, me@c: 2. Use pdsh, ssh or openmpi, or --num-gpus",
        ),
        (
            f"--launcher slurm -i a:1 --force_multi {MULTI}",
            "[launch::backends] --launcher slurm cannot choose slots 1 of a, only the number",
        ),
        (
            f"--launcher impi --ssh_port 3 {MULTI}",
            "[launch::backends] --ssh-port with --launcher impi",
        ),
        (
            f"--launcher openmpi --bind_cores_to_rank --enable_each_rank_log d {MULTI}",
            "[launch::command] --bind-cores-to-rank, --enable-each-rank-log has no effect with "
            "--launcher openmpi, which starts the ranks itself: drop it",
        ),
        (
            "--launcher pdsh --venv_script v train.py",
            "[launch::command] --launcher, --venv-script has no effect without a hostfile",
        ),
        (f"--nproc 2 {MULTI}", "[launch::command] --hostfile start all nodes from here, but"),
        (f"--no_ssh {MULTI}", "[launch::command] --no-ssh needs --node-rank, 0 to 2"),
        (f"--no_ssh --node_rank 3 {MULTI}", "[launch::command] --node-rank must be 0 to 2"),
        (f"--include=a: {MULTI}", "[launch::select] --include a:: the list of slots of a is empty"),
        (f"-e b@a: {MULTI}", "[launch::select] --exclude b@a:: the list of slots of a is empty"),
        (
            "--include=localhost: train.py",
            "[launch::select] --include localhost:: the list of slots of localhost is empty; "
            "allowed are 0 to 0 (this machine), or localhost without a colon for all",
        ),
        ("--layout 0@ --node-rank 0 train.py", "[launch::layout] --layout: '' is not a list like"),
        ("--layout 0@1 --node-rank 2 train.py", "[launch::command] --node-rank must be 0 to 1"),
        ("--layout 0@x train.py", "[launch::layout] --layout: 'x' is not a list like 0-3,6"),
        ("--layout 0 --nproc 1 train.py", "[launch::command] give --layout or --nproc, not both"),
        ("--nnodes 2 train.py", "[launch::options] --nnodes above 1 needs --rdzv-endpoint"),
        (
            "--rdzv-endpoint a:1 --master_addr a train.py",
            "[launch::command] give --rdzv-endpoint or --master-addr, not both",
        ),
        (
            "--autotuning run train.py",
            "[launch::command] --autotuning needs --as-deepspeed",
        ),
        ("--module --no_python x", "[launch::options] --module needs Python"),
        (
            "--enable_each_rank_log hosts train.py",
            "[launch::options] --enable-each-rank-log hosts is",
        ),
        ("none.py", "[launch::options] no such script: none.py"),
        ("--no_python no-such-program", "[launch::options] no such script: no-such-program"),
        ("--elastic_training train.py", "[launch::command] --elastic-training needs a --hostfile"),
        (
            f"--elastic_training --min_elastic_nodes 4 {MULTI}",
            "[launch::command] --min-elastic-nodes 4 --max-elastic-nodes 3: allowed are 1 to 3",
        ),
        ("--env-file none train.py", "[launch::env_file] cannot read the env file none: "),
        (
            "--bind_core_list 0-9999 train.py",
            "[launch::cores] --bind-core-list 0-9999: this process",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words, message, refused):
    assert re.match(re.escape(f"penstock: {message}"), refused(*words.split()))


@pytest.mark.parametrize("option", ["--layout=", "--bind-core-list=", "--bind_core_list= "])
def test_an_empty_list_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([option, "train.py"])
    assert "the list is empty; give numbers, or drop the option" in capsys.readouterr().err


def test_the_address_of_the_first_node(monkeypatch):
    """Its name where that has an address for others, else the first of `hostname -I`."""

    def job(*names):
        return backends.Job(["x"], [Node(n, (0,)) for n in names], "", {}, RankOptions())

    known = {"far": "10.0.0.1", "localhost": "127.0.0.1"}

    def getaddrinfo(host, port):
        if host not in known:
            raise OSError(host)
        return [(0, 0, 0, "", (known[host], 0))]

    asked = []

    def run(words, **settings):
        asked.append(words)
        out = "192.168.0.5 172.17.0.1 \n" if words[-3] != "dumb" else ""
        return remote.subprocess.CompletedProcess(words, 0, out, "")

    monkeypatch.setattr(remote.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(remote.subprocess, "run", run)
    assert remote.master_address(job("me@far", "b")) == "far"
    assert remote.master_address(job("localhost")) == "localhost"
    assert not asked
    assert remote.master_address(job("localhost", "b")) == "192.168.0.5"
    assert remote.master_address(job("me@alias", "b")) == "192.168.0.5"
    assert asked[1] == [*SSH, "me@alias", "hostname", "-I"]
    with pytest.raises(
        RuntimeError, match=r"^\[launch::master_address\] the name dumb .*give --master-addr"
    ):
        remote.master_address(job("dumb", "b"))


def test_the_first_task_that_srun_names_counts():
    said = b"""srun: error: n1: task 1: Exited with exit code 7
srun: launch/slurm: _step_signal: Terminating StepId=2.0
srun: error: n1: task 0: Terminated
"""
    assert remote._first_code_of_srun(said.splitlines()) == 7
    killed = b"srun: error: n[1-2]: tasks 1,3: Killed\nsrun: error: n1: task 0: Terminated\n"
    assert remote._first_code_of_srun(killed.splitlines()) == 137
    dumped = b"srun: error: n1: task 1: Segmentation fault (core dumped)\n"
    assert remote._first_code_of_srun(dumped.splitlines()) == 139
    assert remote._first_code_of_srun([b"srun: error: Unable to create step"]) == 0


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "launching.md"


def parser():
    made = argparse.ArgumentParser()
    arguments.add_options(made, "penstock run")
    return made


def test_the_page_has_every_option():
    page = PAGE.read_text(encoding="utf-8")
    rows = "\n".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    told = set(re.findall(r"(?<=`)--?[A-Za-z][a-z-]*", rows))
    actions = [one for one in parser()._actions if one.help != argparse.SUPPRESS]
    there = {name for one in actions for name in one.option_strings if "_" not in name}
    assert told == there - {"-h", "--help"}


def test_the_commands_of_the_page_are_understood():
    page = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:srun [^`\n]*)?penstock run ([^`\n]*)$", page, re.M)
    assert len(lines) > 12
    for line in lines:
        assert parser().parse_args(shlex.split(line, comments=True)).script.split(".")[0] in (
            "train",
            "package",
        )
