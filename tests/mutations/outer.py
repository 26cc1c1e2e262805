"""Mistakes in outer steps."""

from __future__ import annotations

from planted import Mutation, Pytest

OUTER = "src/engine/step/outer_step.cpp"


def outer(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_outer_steps.py", "-k", tests))


WEIGHTS = outer("those_of_plain and zero2")

OVER_NODES = [
    Mutation(
        "an outer step has no Nesterov momentum",
        OUTER,
        "anchor.sub_(gradient, comm_.outer_lr).sub_(momentum, ",
        "anchor.sub_(momentum, ",
        WEIGHTS,
    ),
    Mutation(
        "what users write after an outer step is not part of the anchors",
        OUTER,
        "  since_ = 0;\n  anchored_ = false;\n}\n\nvoid OuterStep::failed",
        "  since_ = 0;\n}\n\nvoid OuterStep::failed",
        outer("later_writes"),
    ),
    Mutation(
        "an outer step does not wait for the publish before it",
        OUTER,
        "for (const exec::UnitState& unit : executor_.units()) unit.param_ready.wait();",
        "",
        outer("bitwise or same or int4_stays"),
    ),
    Mutation(
        "momenta start at zero after a load",
        "src/engine/model/checkpoints.cpp",
        "if (state.outer) std::ranges::move(state.outer->momenta(), std::back_inserter(parts));",
        "",
        outer("momenta"),
    ),
    Mutation(
        "a save between outer steps saves one node's weights",
        "src/engine/model/checkpoints.cpp",
        "if (state.outer && state.outer->steps_since() > 0) {",
        "if (false) {",
        outer("between_outer_steps"),
    ),
    Mutation(
        "a node that failed lets others wait for the timeout",
        "src/engine/step/core_state.cpp",
        "if (outer) outer->failed(left);",
        "",
        outer("dies"),
    ),
]
