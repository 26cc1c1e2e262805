"""penstock run on this machine: how ranks are started, logged and bound, and nodes of its own.

The scripts use no torch, so each case costs one start of the launcher.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import psutil
from ports import free_port

SAY = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
print(*(os.environ[name] for name in names), sys.argv[1:], flush=True)
"""
DEEPSPEED = "from penstock.launch import deepspeed_main; raise SystemExit(deepspeed_main())"


def start(folder: pathlib.Path, *words: str, script: str = SAY, **settings):
    (folder / "script.py").write_text(script, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        **settings,
    )


def finish(process) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def test_the_deepspeed_command(tmp_path):
    """A module, its arguments, DeepSpeed's variables, and each rank's own log and cores."""
    allowed = sorted(os.sched_getaffinity(0))
    script = SAY + (
        "names = 'LOCAL_SIZE CROSS_RANK CROSS_SIZE PENSTOCK_AS_DEEPSPEED '\n"
        "names += 'CUDA_VISIBLE_DEVICES FILE'\n"
        "print(*(os.environ[name] for name in names.split()))\n"
        "print('cores', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
        "print('error', file=sys.stderr)\n"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (tmp_path / "env").write_text("FILE='two words'\n", encoding="utf-8")
    options = "--num_gpus 2 --module --enable_each_rank_log logs/new --env-file env -q".split()
    options += ["--bind_cores_to_rank"] if len(allowed) > 1 else []
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED, *options, "script", "two words", "--flag"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    logs = sorted((tmp_path / "logs" / "new").iterdir())
    assert [log.name[14:] for log in logs] == ["_rank0.log", "_rank1.log"]
    bound = []
    for rank, log in enumerate(logs):
        lines = log.read_text(encoding="utf-8").splitlines()
        said = [line for line in lines if not line.startswith("cores")]
        arguments = [f"--local_rank={rank}", "two words", "--flag"]
        expected = [f"{rank} {rank} 2 2 {arguments}", "2 0 1 1 0,1 two words", "error"]
        assert sorted(said) == sorted(expected)
        bound += [line for line in lines if line.startswith("cores")]
    if len(allowed) > 1:
        assert len(set(bound)) == 2


def test_a_program_that_cannot_be_started(tmp_path):
    (tmp_path / "program").write_text("#!/no/such/interpreter\n", encoding="utf-8")
    (tmp_path / "program").chmod(0o755)
    code, _, err = finish(start(tmp_path, "--no-python", "./program"))
    assert code == 127
    assert "./program: No such file or directory" in err


def test_nodes_with_other_numbers_of_ranks(tmp_path):
    """Two nodes of this machine, which meet at the endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    common = ["--layout", "4@0,2", "--rdzv-endpoint", endpoint, "--node-rank"]
    nodes = [start(tmp_path, *common, str(node), "script.py") for node in range(2)]
    said = []
    for node in nodes:
        code, out, err = finish(node)
        assert code == 0, err
        said += [
            line.partition("] ")[2] if line[0] == "[" else line for line in (out + err).splitlines()
        ]
    assert sorted(said) == ["0 0 3 1 []", "1 0 3 2 []", "2 1 3 2 []"]


def test_the_first_failure_counts_on_every_node(tmp_path):
    """A rank of node 1 fails, those of node 0 would wait for ever."""
    script = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / ("there" + os.environ["RANK"])).touch()
while len(list(here.glob("there*"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    print("the true reason", file=sys.stderr)
    sys.exit(7)
time.sleep(600)
"""
    common = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--grace-s", "0"]
    nodes = [
        start(tmp_path, *common, "--node-rank", str(node), "script.py", script=script)
        for node in range(2)
    ]
    first, second = (finish(node) for node in nodes)
    assert (first[0], second[0]) == (7, 7), first[2] + second[2]
    elsewhere = (
        "penstock run: the run failed elsewhere: rank 1 failed first, with exit code 7 (node 1)"
    )
    assert first[2].splitlines()[-1] == elsewhere
    assert second[2].splitlines()[-1] == "  the true reason"


def test_the_end_of_stdin_ends_the_run(tmp_path):
    """What a node's launcher does when the connection that started it is gone."""
    script = "import time; print('there', flush=True); time.sleep(600)"
    process = start(tmp_path, "--end-with-stdin", "script.py", script=script, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "there\n"
    (rank,) = psutil.Process(process.pid).children()
    process.stdin.close()
    process.stdin = None
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert not rank.is_running()


def test_a_pid_file_and_levels(tmp_path):
    script = """
import os, sys
print(open(os.environ["TMPDIR"] + f"/{os.getppid()}.deepspeed").read())
sys.exit(3)
"""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    options = ("--save_pid", "--log_level", "critical")
    process = start(tmp_path, *options, "script.py", script=script, env=env)
    code, out, err = finish(process)
    assert (code, out, err) == (3, f"{process.pid}\n", "")
    assert not list(tmp_path.glob("*.deepspeed"))
