"""penstock bench: what it writes, who reads it, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import shared_memory
from ports import free_port

# Set for all that a test starts, so that survivors can be found by it.
MARK = "PENSTOCK_TEST_MARK"
TINY = ["--seconds", "0.5", "--width", "64", "--tokens", "128"]
NO_RANGE = 1e5, 1e16  # of FLOP/s and bytes/s, on whatever machine
BLOCKS = ["--model", "1024,2048", "--world", "4", "--node", "2"]


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {MARK: str(folder)},
    )


def survivors(folder):
    def marked(process):
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.environ().get(MARK) == str(folder)
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if marked(process)]


@pytest.fixture
def folder(tmp_path):
    """Where a bench runs, which leaves its file there and nothing else."""
    (tmp_path / "disk").mkdir()
    shared = shared_memory()
    yield tmp_path
    left = survivors(tmp_path)
    for process in left:
        process.kill()
    assert not left
    assert sorted(os.listdir(tmp_path)) == ["disk", "m.json"]
    assert not os.listdir(tmp_path / "disk")
    assert not shared_memory() - shared


def ended(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bench_that_is_stopped_leaves_nothing(ranks, tmp_path):
    process = start(tmp_path, "bench", "--nproc", str(ranks), "--seconds", "600")
    assert process.stdout.readline().startswith("[1/")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert not survivors(tmp_path) and not os.listdir(tmp_path)


def check(folder, out, unknown):
    """What the file and the table have, and that the file is read."""
    from penstock.bench import machine_file  # noqa: PLC0415

    told = json.loads((folder / "m.json").read_text())
    fields = list(machine_file.FIELDS)
    assert list(told) == [*fields, "about"]
    assert {field for field in fields if told[field] is None} == unknown
    least, most = NO_RANGE
    for field in set(fields) - unknown - {"overlap"}:
        assert least < told[field] < most, field
        spread = told["about"]["spread"][field]
        assert spread["median"] == told[field] and spread["runs"] >= 3
        assert spread["low"] <= told[field] <= spread["high"]
    assert 0 <= told["overlap"] <= 1
    machine = machine_file.load(folder / "m.json")
    for field in fields:
        assert field in unknown or getattr(machine, field) == told[field]
    lines = out.splitlines()
    steps = [line for line in lines if re.match(r"\[\d/\d\] ", line)]
    assert steps and steps[-1].startswith(f"[{len(steps)}/{len(steps)}] ")
    for field in fields:
        row = next(line for line in lines if line.startswith(f"{field} "))
        assert ("not measured" in row) == (field in unknown)
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_measured(ranks, folder):
    words = ["bench", "--nproc", str(ranks), *TINY, "--disk", "disk", "-o", "m.json"]
    out = ended(start(folder, *words))
    told = check(folder, out, {"node"} if ranks == 2 else {"local", "node"})
    about = told["about"]
    assert about["ranks"] == ranks and about["threads"] >= 1 and about["cpu"]
    assert (about["width"], about["tokens"], about["precision"]) == (64, 128, "fp32")
    assert about["disk"] == str(folder / "disk") and about["torch"] and about["penstock"]
    if about["device"] == "cpu":
        assert told["device_memory"] == told["host_memory"]


def test_across_nodes(folder):
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        start(
            folder, "run", "--nproc", "1", "--nnodes", "2", "--node-rank", node, "--rdzv-endpoint",
            endpoint, "--module", "penstock.bench", *TINY, "--disk", "disk", "-o", "m.json",
        )
        for node in "01"
    ]  # fmt: skip
    out = [ended(node) for node in nodes]
    assert check(folder, out[0], {"local"})["about"]["ranks"] == 2 and out[1] == ""


@pytest.mark.parametrize(
    "words, said",
    [
        (["--width", "100"], "--width 100: give a multiple of 64, or a number below it"),
        (["--tokens", "200"], "--tokens 200: give a multiple of 128, or a number below it"),
        (["--disk", "nowhere"], "--disk nowhere is not a writable folder"),
        (["-o", "no/m.json"], "--output no/m.json is not a writable file"),
        (["--nproc", "0"], "--nproc and --nnodes must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_said_first(words, said, tmp_path, monkeypatch, capsys):
    from penstock import cli  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""


def test_a_rank_that_fails_fails_the_command(tmp_path):
    process = start(tmp_path, "run", "--nproc", "2", "--module", "penstock.bench", "--width", "100")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "--width 100" in err
    assert not survivors(tmp_path)


# ---- who reads the file


def planned(capsys, *words):
    """Seconds of a step by alternative."""
    from penstock import cli  # noqa: PLC0415

    assert cli.main(["plan", *BLOCKS, "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)["alternatives"]
    return {(one["strategy"], one["optimizer"], one["params"]): one["seconds"] for one in found}


def test_a_plan_for_that_machine(capsys, tmp_path):
    file = tmp_path / "machine.json"
    values = {"flops": 1e9, "local": 2e6, "node": None, "host_disk": 3e6, "overlap": 0.5}
    file.write_text(json.dumps({**values, "about": {"ranks": 2}}))
    measured = ["--machine", str(file)]
    options = ["--flops", "1e9", "--local-link", "2e6", "--host-disk-link", "3e6"]
    found = planned(capsys, *measured)
    assert found == planned(capsys, *options)
    file.write_text(json.dumps({**values, "flops": 1e6}))
    assert planned(capsys, *measured)["ddp", "none", "none"] > found["ddp", "none", "none"]
    assert planned(capsys, *measured, "--flops", "1e9") == found
    file.write_text("{}")
    assert planned(capsys, *measured) == planned(capsys)


def test_meshes_for_that_machine(capsys, tmp_path):
    from penstock import cli  # noqa: PLC0415

    (tmp_path / "machine.json").write_text('{"flops": 1e9}')
    words = ["plan", "--params", "1e6", "--nodes", "1", "--gpus", "2", "--json"]
    told = []
    for machine in ([], ["--machine", str(tmp_path / "machine.json")], ["--flops", "1e9"]):
        assert cli.main([*words, *machine]) == 0
        told.append(json.loads(capsys.readouterr().out)["alternatives"])
    assert told[1] == told[2] != told[0]


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "cannot be read: No such file or directory; `penstock bench` writes such a file"),
        ("flops: 1", "is not JSON; "),
        ("[1]", "is not a JSON object"),
        ('{"flop": 1}', 'unknown "flop"; allowed: flops, local, node, device_host, '),
        ('{"flops": 0}', '"flops" is 0; allowed: a number above 0, or null'),
        ('{"local": -1.5}', '"local" is -1.5; allowed: a number above 0'),
        ('{"node": "1e9"}', '"node" is "1e9"; allowed: a number above 0'),
        ('{"node": true}', '"node" is true; allowed: a number above 0'),
        ('{"host_disk": NaN}', "is not JSON"),
        ('{"host_disk": Infinity}', "is not JSON"),
        ('{"overlap": 1.1}', '"overlap" is 1.1; allowed: a number from 0 to 1, or null'),
        ('{"overlap": -0.1}', '"overlap" is -0.1; allowed: a number from 0 to 1, or null'),
        ('{"overlap": "x"}', '"overlap" is "x"; allowed: a number from 0 to 1, or null'),
    ],
)
def test_a_bad_file_is_refused(text, said, capsys, tmp_path):
    from penstock import cli  # noqa: PLC0415

    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    assert cli.main(["plan", *BLOCKS, "--machine", str(file)]) == 2
    err = capsys.readouterr().err
    assert str(file) in err and said in err and err.count("\n") == 1
