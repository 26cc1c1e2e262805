"""Every name that scripts import from deepspeed is there, and works or says why not."""

import pytest
from inventory import lines
from record import HERE, cases_found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return cases_found([HERE / "inventory.py"], tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize("line", lines())
def test_name(line, found):
    assert found[line] == ""
