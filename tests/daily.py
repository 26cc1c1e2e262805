"""Which cases run every day; the whole set takes hours on two cores.

Each test function has a budget of seconds. `costs.json` has the seconds of one case of each test
that would exceed it; of such a test a sample runs, which is always the same. A case that catches a
planted fault runs, and a run of `--full`, of `-k` or of single tests has all. `tests/daily.py FILE`
writes the costs from a report of `pytest --full --junitxml=FILE`, or of a daily run.
"""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import random
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
COSTS = HERE / "costs.json"
BUDGET = 6.0  # seconds of one worker
# The part of these files that runs, one in so many. Their cases come from one run of a script.
SHARED = {
    "tests/drop_in/test_accelerated.py": 4,
    "tests/drop_in/test_drop_in_loops.py": 3,
    "tests/drop_in/test_lightning.py": 3,
    "tests/drop_in/test_own_optimizers.py": 5,
    "tests/drop_in/test_trainers.py": 5,
}
WHOLE = (
    "tests/parity/test_known_bugs.py",  # each of its cases was once a bug
    # These choose a sample themselves, in which every mesh, strategy or tier occurs.
    "tests/device/test_device_meshes.py",
    "tests/device/test_device_parity.py",
    "tests/drop_in/test_trl.py",
    "tests/parity/test_mesh_kills.py",
    "tests/parity/test_meshes.py",
    "tests/parity/test_parity.py",
)
WEEKLY = (  # tests that catch no planted fault alone and that other tests repeat in less time
    "tests/drop_in/test_hf_examples.py::test_accelerate",
    "tests/python/test_plan_command.py::test_proposed_configs_train",
    "tests/python/test_train_3d.py::test_llama_with_virtual_stages_and_disk[cpu]",
)


def planted_commands() -> list[tuple[str, str]]:
    """The file and the `-k` of each pytest command that must catch a planted fault."""
    folder = HERE / "mutations"
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        mutations = importlib.import_module("table").MUTATIONS
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:  # names such as `device` are other modules elsewhere
            del sys.modules[name]
    commands = [one.test.arguments for one in mutations if hasattr(one.test, "targets")]
    return [(words[0], words[2] if "-k" in words else "") for words in commands]


def selects(expression: str, nodeid: str) -> bool:
    """Whether `-k expression` selects the case; the expressions here have `and` and `or` alone."""
    return any(
        all(word.strip().lower() in nodeid.lower() for word in part.split(" and "))
        for part in expression.split(" or ")
    )


def drawn(test: str, count: int, costs: dict[str, float]) -> set[int]:
    """The indices of the cases of "tests/folder/file.py::function", of `count`, that run."""
    file = test.partition("::")[0]
    share = SHARED.get(file) or max(1.0, count * costs.get(test, 0.0) / BUDGET)
    if file in WHOLE:
        share = 1.0
    # Not every k-th: the cases are products of lists, whose lengths k may divide.
    return set(random.Random(file).sample(range(count), math.ceil(count / share)))


def sample(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The cases that run daily, and the others."""
    costs = json.loads(COSTS.read_text())
    planted = planted_commands()
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left = set()
    for name, cases in tests.items():
        runs = drawn(name, len(cases), costs)
        keep = [expression for path, expression in planted if name.startswith(f"{path}::")]
        left |= {
            id(one)
            for i, one in enumerate(cases)
            if (i not in runs or one.nodeid.endswith(WEEKLY))
            and not any(selects(expression, one.nodeid) for expression in keep)
        }
    return [one for one in items if id(one) not in left], [one for one in items if id(one) in left]


def measured(report: str) -> dict[str, float]:
    """The seconds of one case, of the tests of a JUnit report that exceed the budget."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        name = case.attrib["name"].partition("[")[0]
        seconds[f"{file}.py::{name}"].append(float(case.attrib["time"]))
    return {
        test: round(sum(each) / len(each), 1)
        for test, each in sorted(seconds.items())
        if sum(each) > BUDGET / 2
    }


if __name__ == "__main__":
    costs = json.loads(COSTS.read_text()) | measured(sys.argv[1])
    COSTS.write_text(json.dumps(costs, indent=1, sort_keys=True) + "\n")
