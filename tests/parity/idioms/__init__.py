"""The table of idioms: what people do to a model, an optimizer, a parameter, a gradient, a hook or
a module around a training engine, and what comes of it."""

from __future__ import annotations

import importlib

from idioms.table import Idiom

GROUPS = [
    "gradients",
    "backwards",
    "hooks",
    "optimizers",
    "schedules",
    "edits",
    "parameters",
    "parametrized",
    "calls",
    "modules",
    "overrides",
    "overridden_calls",
    "late_changes",
    "outputs",
    "functions",
    "copies",
    "loops",
    "runtime",
]


def every() -> dict[str, Idiom]:
    """The rows, by name, in the order of the page."""
    rows = [row for name in GROUPS for row in importlib.import_module(f"idioms.{name}").rows.idioms]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return dict(zip(names, rows, strict=True))
