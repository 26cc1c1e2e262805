"""The bugs that tests/mutations/run.py plants still have their place in the sources."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_table():
    path = ROOT / "tests" / "mutations" / "table.py"
    spec = importlib.util.spec_from_file_location("mutations_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTATIONS


@pytest.mark.parametrize("mutation", load_table(), ids=lambda mutation: mutation.name)
def test_it_can_be_planted(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
