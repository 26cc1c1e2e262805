"""How the package is switched on, and that it is not there otherwise."""

import os
import subprocess
import sys

import pytest


def _python(code, **env):
    base = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=base | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


_LOOK = """
import importlib.metadata, importlib.util
print(importlib.util.find_spec("deepspeed") is not None)
print(importlib.metadata.version("deepspeed"), importlib.metadata.metadata("deepspeed")["Name"])
"""


def test_it_is_not_there_by_itself():
    done = _python("import importlib.util; print(importlib.util.find_spec('deepspeed'))")
    assert done.stdout == "None\n"


@pytest.mark.parametrize("way", ["variable", "install"])
def test_it_is_found_with_its_metadata(way):
    first = "import penstock.deepspeed; penstock.deepspeed.install()\n" if way == "install" else ""
    done = _python(first + _LOOK, **({} if first else {"PENSTOCK_AS_DEEPSPEED": "1"}))
    assert done.stdout == "True\n0.19.8+penstock deepspeed\n", done.stderr


def test_the_variable_alone_imports_nothing():
    done = _python("import sys; print('torch' in sys.modules)", PENSTOCK_AS_DEEPSPEED="1")
    assert done.stdout == "False\n"


def test_import_is_quick_and_silent():
    slow = "'sympy', 'torch._dynamo', 'torch.distributed.checkpoint', 'transformers'"
    code = f"import sys, deepspeed; print(*({{{slow}}} & set(sys.modules)), end='')"
    done = _python(code, PENSTOCK_AS_DEEPSPEED="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_deepspeed_is_not_mixed_with_it(tmp_path):
    (tmp_path / "deepspeed.py").write_text("mine = True\n")
    code = "import deepspeed, penstock.deepspeed; penstock.deepspeed.install()"
    done = _python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "another deepspeed was imported already" in done.stderr
    code = "import penstock.deepspeed; penstock.deepspeed.install(); import deepspeed as d; d.comm"
    assert _python(code, PYTHONPATH=str(tmp_path)).returncode == 0


def test_it_can_be_switched_off():
    code = "import penstock.deepspeed as p; p.install(); p.uninstall(); import deepspeed"
    assert "ModuleNotFoundError" in _python(code).stderr
