"""Each option of the command `deepspeed`, DeepSpeed's small commands, and the switch."""

import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import tomllib

from penstock import deepspeed as switch
from penstock.cli import deepspeed_command, deepspeed_tools
from penstock.launch import command, exports

HERE = pathlib.Path(__file__).parent
FLAGS = tomllib.loads((HERE / "launch_flags.toml").read_text(encoding="utf-8"))
CASES = [one for one in (*FLAGS["flag"], *FLAGS["older"]) if one["words"]]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith((*exports.PREFIXES, "SLURM_", "PET_", "PDSH_", "CUDA_", "MASTER_")):
            monkeypatch.delenv(name)
    (tmp_path / "hosts").write_text("b slots=2\na slots=2\n")
    (tmp_path / "one").write_text("b slots=2\n")
    for name in ("train.py", "venv"):
        (tmp_path / name).touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pdsh").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("flag", CASES, ids=lambda one: one["names"].split(",")[0])
def test_flag(flag, capsys):
    words = ["--dry-run", *shlex.split(flag["words"])]
    try:
        code = command.deepspeed_main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == (2 if "unrecognized" in flag["shows"][0] else 0), err
    assert all(text in out + err for text in flag["shows"]), out + err
    assert flag.get("hides", "\0") not in out


def test_every_option_of_theirs_is_in_the_table():
    named = " ".join(one["names"] for one in FLAGS["flag"]).replace(",", " ").split()
    assert sorted(set(FLAGS["theirs"].split()) - set(named)) == []


@pytest.mark.parametrize("words", ["--autotuning train.py", "--autotuning test train.py"])
def test_autotuning_needs_a_mode(words):
    with pytest.raises(SystemExit):
        command.deepspeed_main(words.split())


def test_variables_of_env_files_reach_the_nodes(place, capsys):
    (place / ".deepspeed_env").write_text("A_KEY=1 2\n# a comment\nexport B=x\n")
    assert command.deepspeed_main(["--dry-run", "-H", "hosts", "train.py"]) == 0
    assert "A_KEY=1 2" in capsys.readouterr().out.replace("'\"'\"'", "")


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(switch, "_DECIDE", ())  # other tests of this process may have imported them
    switch.install()
    from deepspeed.launcher import runner  # noqa: PLC0415 - only after the switch

    yield runner
    switch.uninstall()
    for name in [one for one in sys.modules if one.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_a_script_may_add_exports(runner, monkeypatch, capsys):
    monkeypatch.setattr(runner, "EXPORT_ENVS", [*runner.EXPORT_ENVS, "WANDB_API"])
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert runner.main(["--dry-run", "-H", "hosts", "train.py"]) == 0
    assert "WANDB_API_KEY=k" in capsys.readouterr().out


def test_a_script_may_set_the_hostfile(runner, place, monkeypatch, capsys):
    monkeypatch.setattr(runner, "DLTS_HOSTFILE", str(place / "hosts"))
    assert runner.main(["--dry-run", "train.py"]) == 0
    assert "-w b,a" in capsys.readouterr().out
    assert runner.parse_args(["train.py"]).hostfile == str(place / "hosts")


# Class -> first word, other words of its command line.
RUNNERS = {
    "PDSHRunner": ("pdsh", ["-w", "b,a"]),
    "OpenMPIRunner": ("mpirun", ["btl_tcp_if_include", "eth0", "KEY"]),
    "MPICHRunner": ("mpirun", ["-ppn", "2"]),
    "IMPIRunner": ("mpirun", ["-hosts", "b,a"]),
    "SlurmRunner": ("srun", ["--ntasks", "4"]),
    "MVAPICHRunner": ("mpirun", ["-n", "4"]),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_runner_class(name, runner):
    from deepspeed.launcher import multinode_runner  # noqa: PLC0415 - only after the switch

    args = runner.parse_args(["--launcher_args", "-mca pml ob1", "train.py", "two words"])
    hosts = {"b": 2, "a": [0, 1]}
    made = getattr(multinode_runner, name)(args, runner.encode_world_info(hosts))
    made.add_export("KEY", "64(x2)")
    environment = {}
    words = made.get_cmd(environment, hosts)
    if name == "PDSHRunner":
        words, _, environment = words
        assert environment["PDSH_RCMD_TYPE"] == "ssh"
    first, others = RUNNERS[name]
    assert words[0] == first and all(one in words for one in others), words
    assert "two words" in " ".join(words) and "-mca pml ob1" in " ".join(words)


def test_filters_may_leave_nothing(runner):
    assert runner.parse_resource_filter({"b": [0, 1]}, exclude_str="b") == {}
    assert runner.parse_resource_filter({"b": [0, 1]}, include_str="b:1") == {"b": [1]}
    with pytest.raises(ValueError, match="no host 'c'"):
        runner.parse_resource_filter({"b": [0, 1]}, include_str="c")
    assert runner._parse_hostfile(["", " b slots=2", "# b slots=3"]) == {"b": 2}


# ---- the small commands and the switch


def test_ds_io(place, capsys):
    assert deepspeed_tools.io(["--folder", ".", "--io_size", "64K", "--loops", "1", "--read"]) == 0
    assert "read of 65536 bytes" in capsys.readouterr().out
    assert not list(place.glob("ds_io*"))
    assert deepspeed_tools.io(["--folder", "none", "--io_size", "64K"]) == 2


def test_ds_ssh_reads_the_hostfile(place, capfd):
    (place / "bin" / "pdsh").write_text('#!/bin/sh\necho "$@"\n')
    assert deepspeed_tools.ssh(["-f", "hosts", "ls", "a b"]) == 0
    assert capfd.readouterr().out == "-R ssh -w b,a ls 'a b'\n"


@pytest.fixture
def environment(place, monkeypatch):
    commands, packages = place / "scripts", place / "packages"
    commands.mkdir()
    packages.mkdir()
    monkeypatch.setattr(deepspeed_command, "_places", lambda: (commands, packages))
    return commands, packages


def test_switch(environment, place):
    commands, packages = environment
    files = deepspeed_command.switch_on()
    assert {one.name for one in commands.iterdir()} == set(deepspeed_command.COMMANDS)
    assert str(switch.FOLDER) in (packages / files[-1].name).read_text().splitlines()
    assert deepspeed_command.switch_on() == files  # again
    script = "import importlib.metadata as m, sys; print(m.version('deepspeed'), sys.argv)"
    (place / "train.py").write_text(script)
    base = {key: one for key, one in os.environ.items() if not key.startswith("PENSTOCK")}
    words = [str(commands / "deepspeed"), "--num_gpus", "1", "train.py", "--x"]
    done = subprocess.run(words, env=base, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout == "0.19.8+penstock ['train.py', '--local_rank=0', '--x']\n", done.stderr
    assert sorted(deepspeed_command.switch_off()) == sorted(files)
    assert not list(commands.iterdir()) and not list(packages.iterdir())


def test_switch_keeps_other_programs(environment):
    commands, packages = environment
    (commands / "ds_report").write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="ds_report belongs to another program"):
        deepspeed_command.switch_on()
    assert [one.name for one in commands.iterdir()] == ["ds_report"]
    (commands / "ds_report").unlink()
    (packages / "deepspeed-0.19.8.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n"
    (packages / "deepspeed-0.19.8.dist-info" / "METADATA").write_text(text)
    with pytest.raises(ValueError, match="DeepSpeed 0.19.8 is installed in this environment"):
        deepspeed_command.switch_on()


# ---- the page


def test_page_is_made_from_the_tables():
    root = HERE.parents[1]
    rows = tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))["row"]
    assert all(set(row) == {"area", "what", "deepspeed", "here", "test"} for row in rows)
    words = [sys.executable, str(root / "tools/deepspeed_page.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_ds_elastic(place, capsys):
    from penstock.launch import elastic_batches  # noqa: PLC0415 - beside its only test

    section = {"enabled": True, "max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3]}
    section |= {"min_gpus": 1, "version": 0.1}
    (place / "c.json").write_text(json.dumps({"elasticity": section}))
    assert elastic_batches.main(["-c", "c.json", "-w", "4"]) == 0
    out = capsys.readouterr().out
    assert "final_batch_size.... 24" in out and "micro_batch_size.... 3" in out
