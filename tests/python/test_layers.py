"""The repository's own rules: layers and sizes hold, and the tools that say so notice mistakes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("options", [(), ("--self-test",)], ids=["tree", "planted"])
@pytest.mark.parametrize("tool", ["check_layers", "check_size"])
def test_tool(tool, options):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_extra_exception_breaks_the_ratchet(tmp_path):
    source = "def f(a, b, c, d, e, g, h):\n    pass\n"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "long.py").write_text(source, encoding="utf-8")
    outcomes = {}
    for listed in ("max 0\n", "max 1\ntools/long.py:f why\n", "max 0\ntools/long.py:f why\n"):
        (tmp_path / "tools" / "size_exceptions.txt").write_text(listed, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "check_size.py"), "--root", str(tmp_path)],
            capture_output=True,
            text=True,
        )
        outcomes[listed] = done.returncode
    assert list(outcomes.values()) == [1, 0, 1]
