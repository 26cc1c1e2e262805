"""Every name that scripts import from deepspeed is there, and works or says why not."""

import json
import os
import subprocess
import sys

import pytest
from inventory import lines
from record import HERE


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, HERE / "inventory.py"],
        env=env | {"PENSTOCK_AS_DEEPSPEED": "1"},
        cwd=tmp_path_factory.mktemp("empty"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = next(one for one in done.stdout.splitlines() if one.startswith("CASE "))
    return json.loads(line.removeprefix("CASE "))


@pytest.mark.parametrize("line", lines())
def test_name(line, found):
    assert found[line] == ""
