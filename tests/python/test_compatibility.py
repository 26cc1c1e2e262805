"""tools/compatibility.py: a matrix from test results, and none from failures."""

from __future__ import annotations

import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "compatibility.py"
ZOO = '<testcase classname="tests.parity.test_zoo" name="test_zoo'
WORKS = f'{ZOO}[zero3-bf16-world2-moe-off]"/>'
SKIPPED = f'{ZOO}[hpz-moe]"><skipped/></testcase>'
FAILED = f'{ZOO}[ddp-moe]"><failure/></testcase>'
REFUSED = """<testcase classname="tests.parity.test_loops" name="test_penalty[by_hand-ddp]">
<properties><property name="refused" value="penstock.ConfigError: [front::backward] It cannot be. So
use a|b."/></properties></testcase>"""


def tabulate(folder, *cases):
    results, output = folder / "results.xml", folder / "matrix.md"
    results.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    command = [sys.executable, str(TOOL), "--junit", str(results), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done, output.read_text().splitlines() if output.exists() else None


def test_cells(tmp_path):
    done, lines = tabulate(tmp_path, WORKS, REFUSED, SKIPPED)
    assert done.returncode == 0, done.stderr
    assert "| moe |  |  |  | works |  |  |" in lines
    assert "| penalty: by hand | refused (1) |  |  |  |  |  |" in lines
    assert "1. ConfigError: It cannot be" in lines


def test_rows_that_work_under_the_same_strategies_are_a_list(tmp_path):
    alike = [WORKS.replace("moe", model) for model in ("moe", "gpt", "tied", "lstm", "nested")]
    done, lines = tabulate(tmp_path, *alike, REFUSED)
    assert done.returncode == 0, done.stderr
    first = lines.index("Works under `zero3`:")
    assert lines[first + 2 : first + 7] == ["- moe", "- gpt", "- tied", "- lstm", "- nested"]


def test_failed_test_is_an_error(tmp_path):
    done, lines = tabulate(tmp_path, WORKS, FAILED)
    assert (done.returncode, lines) == (1, None)
    assert done.stderr == "compatibility: tests.parity.test_zoo::test_zoo[ddp-moe] failed\n"


def test_cell_with_two_values_is_an_error(tmp_path):
    done, lines = tabulate(tmp_path, WORKS, WORKS.replace("bf16", "fp32"), REFUSED)
    assert done.returncode == 0 and len(lines) > 0
    done, _ = tabulate(tmp_path, REFUSED, REFUSED.replace("cannot", "can"))
    assert done.returncode == 1 and "is both" in done.stderr


def test_no_results_are_an_error(tmp_path):
    done, lines = tabulate(tmp_path, SKIPPED)
    assert (done.returncode, lines) == (1, None)


def test_missing_results_are_an_error(tmp_path):
    command = [sys.executable, str(TOOL), "--junit", str(tmp_path / "none.xml")]
    assert subprocess.run(command, capture_output=True).returncode == 1
