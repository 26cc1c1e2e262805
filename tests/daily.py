"""Which cases of the largest tables run every day; the whole set takes hours on two cores.

Of each parametrized test in a file named here, every k-th case runs, from the first; a run of
`--full`, of `-k` or of single tests has all. Tables that choose their sample themselves (--full in
their own pytest_generate_tests) are not here, nor are those whose every case was once a bug.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

STRIDES = {
    "parity/test_idioms.py": 3,
    "parity/test_activations.py": 6,
    "parity/test_activation_limits.py": 2,
    "parity/test_border_ranks.py": 2,
    "parity/test_optimizers.py": 3,
    "parity/test_root_layers.py": 4,
    "parity/test_loops.py": 2,
    "parity/test_repeatable.py": 2,
    "parity/test_zoo.py": 3,
    "parity/test_tiers.py": 4,
    "parity/test_tiling.py": 2,
    "parity/test_mesh_stories.py": 2,
    "parity/fuzz/test_fuzz.py": 2,
    "parity/test_pipeline.py": 2,
    "parity/test_pipeline_state.py": 2,
    "parity/test_tensor.py": 2,
    "parity/test_tensor_life.py": 2,
    "parity/test_transformers.py": 2,
    "parity/test_sequence.py": 3,
    "parity/test_border_gradients.py": 2,
    "parity/test_overrides.py": 3,
    "drop_in/test_drop_in_loops.py": 2,
    "drop_in/test_configs.py": 2,
    "drop_in/test_pipe.py": 2,
    "drop_in/test_megatron_style.py": 2,
    "drop_in/test_own_optimizers.py": 2,
    "drop_in/test_trainers.py": 2,
    "device/test_device_construction.py": 2,
    "device/test_device_wires.py": 4,
    "parity/test_wires.py": 2,
    "python/test_bench.py": 2,
    "python/test_faults.py": 2,
    "python/test_top.py": 2,
    "python/test_checkpoint_tensor.py": 2,
    "python/test_checkpoint_layouts.py": 2,
}
FEW = 6  # a test with at most so many cases runs all of them


def planted_commands() -> list[tuple[str, str]]:
    """The file and the `-k` of each pytest command that must catch a planted fault."""
    folder = pathlib.Path(__file__).parent / "mutations"
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


def sample(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The cases that run daily, and the others. A case that catches a planted fault runs."""
    planted = planted_commands()
    tests: dict[str, list[Any]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for name, cases in tests.items():
        stride = next((k for path, k in STRIDES.items() if f"{path}::" in name), 1)
        if len(cases) <= FEW:
            continue
        keep = [expression for path, expression in planted if f"{path}::" in name]
        left |= {
            id(one)
            for i, one in enumerate(cases)
            if i % stride and not any(selects(expression, one.nodeid) for expression in keep)
        }
    return [one for one in items if id(one) not in left], [one for one in items if id(one) in left]
