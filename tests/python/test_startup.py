"""What a command imports: torch's Python package takes longer than most commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs a command as its script does, and prints which of the named modules it has imported.
PROBE = """
import json, sys
from penstock.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code or 0
loaded = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
print(json.dumps([code, loaded]))
"""
HEAVY = ["torch", "numpy", "transformers"]
NATIVE = "penstock._penstock"


def probe(words, names, cwd=None):
    made = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names), *words],
        capture_output=True, text=True, timeout=240, check=True, cwd=cwd,
    )  # fmt: skip
    *printed, last = made.stdout.splitlines()
    code, loaded = json.loads(last)
    return code, loaded, "\n".join(printed), made.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["stats"]], ids=" ".join)
def test_what_needs_no_command_imports_none(words):
    _, loaded, out, err = probe(words, [*HEAVY, NATIVE, "penstock.launch", "penstock.monitor"])
    assert loaded == [] and out + err


def test_version():
    assert probe(["--version"], [])[2] == "penstock 0.1.0"


@pytest.mark.parametrize(
    "word, says",
    [("stauts", 'did you mean "status"?'), ("xyzzy", "the commands are run, plan, bench")],
)
def test_a_wrong_command_is_one_sentence(word, says):
    code, _, out, err = probe([word], [])
    assert (code, out) == (2, "")
    assert err.startswith(f'penstock: there is no command "{word}": ') and says in err


COMMANDS = "run plan bench status top inspect report convert explain doctor".split()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_shown_without_torch(command):
    code, loaded, out, _ = probe([command, "--help"], HEAVY)
    assert (code, loaded) == (0, []) and f"penstock {command}" in out


def test_commands_that_need_no_torch(tmp_path):
    config = '{"strategy": "zero3", "optimizer": {"lr": 1e-3}}'
    code, loaded, out, err = probe(["explain", "--config", config, "--world", "2"], HEAVY)
    assert (code, loaded) == (0, []), err
    assert json.loads(out)["strategy"] == "zero3"
    code, loaded, out, err = probe(["plan", "--params", "7e9", "--world", "8"], HEAVY)
    assert (code, loaded) == (0, []) and out.startswith("7000000000 parameters in 34 units"), err
    # They have the C++ module, and what they look for is not there.
    for words in (["inspect", str(tmp_path)], ["status", str(2**30)], ["top", str(tmp_path)]):
        code, loaded, out, err = probe(words, [*HEAVY, NATIVE])
        assert (code, loaded, out) == (2, [NATIVE], ""), words
        assert err.startswith(f"penstock: [{words[0]}] "), err


def run(code):
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    return made.stdout.split()


def test_importing_penstock_imports_no_torch():
    assert run("import sys, penstock; print('torch' in sys.modules, penstock.__version__)") == [
        "False", "0.1.0",
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["import penstock, torch", "import torch, penstock"])
def test_the_back_end_is_registered_in_any_order(first):
    code = f"{first}; print(torch.distributed.is_backend_available('penstock'))"
    assert run(code) == ["True"]


def test_public_names_are_there_when_they_are_used():
    code = """
import penstock
for name in penstock.__all__:
    assert name in dir(penstock) and getattr(penstock, name).__name__ == name, name
assert penstock.schedules.WarmupLR and penstock.environment.adopt
assert not hasattr(penstock, "nothing")
print(penstock.init.__module__.split(".")[0])
"""
    assert run(code) == ["penstock"]
