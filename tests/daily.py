"""Which cases of the largest tables run every day: all tests take half an hour on two cores then.

Of each parametrized test in a file named here, every k-th case runs, from the first; a run of
`--full`, of `-k` or of single tests has all. Tables that choose their sample themselves (--full in
their own pytest_generate_tests) are not here, nor are those whose every case was once a bug.
"""

from __future__ import annotations

from typing import Any

STRIDES = {
    "parity/test_idioms.py": 2,
    "parity/test_activations.py": 3,
    "parity/test_optimizers.py": 3,
    "parity/test_root_layers.py": 4,
    "parity/test_loops.py": 2,
    "parity/test_repeatable.py": 2,
    "parity/test_zoo.py": 2,
    "parity/test_tiers.py": 2,
    "parity/test_pipeline.py": 2,
    "parity/test_pipeline_state.py": 2,
    "parity/test_tensor_life.py": 2,
    "parity/test_transformers.py": 2,
    "parity/test_border_gradients.py": 2,
    "drop_in/test_drop_in_loops.py": 2,
    "drop_in/test_configs.py": 2,
    "drop_in/test_pipe.py": 2,
    "drop_in/test_trainers.py": 2,
    "python/test_faults.py": 2,
    "python/test_checkpoint_tensor.py": 2,
    "python/test_checkpoint_layouts.py": 2,
}
FEW = 6  # cases of a test, of which all run


def sample(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """Those that run, and those that do not."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for name, cases in tests.items():
        stride = next((k for path, k in STRIDES.items() if f"{path}::" in name), 1)
        if len(cases) > FEW:
            left |= {id(one) for i, one in enumerate(cases) if i % stride}
    return [one for one in items if id(one) not in left], [one for one in items if id(one) in left]
