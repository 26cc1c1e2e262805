"""The bugs that tests/mutations/run.py plants still have their place in the sources."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_table():
    folder = str(ROOT / "tests" / "mutations")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("table").MUTATIONS
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("mutation", load_table(), ids=lambda mutation: mutation.name)
def test_it_can_be_planted(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
