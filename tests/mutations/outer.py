"""Mistakes in outer steps."""

from __future__ import annotations

from planted import Mutation, Pytest

OUTER = "src/engine/step/outer_step.cpp"


def outer(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_outer_steps.py", "-k", tests))


def errors(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_outer_errors.py", "-k", tests))


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
        "  if (since_ > 0) return;\n",
        "  static bool once = false;\n  if (std::exchange(once, true)) return;\n",
        outer("later_writes"),
    ),
    Mutation(
        "each node starts with the weights of its own first rank",
        "src/engine/model/adoption.cpp",
        "if (between_nodes_ && rank_ == 0) between_nodes_(label, values.data_ptr(), bytes);",
        "",
        WEIGHTS,
    ),
    Mutation(
        "nodes do not compare the weights before an outer step",
        OUTER,
        "  compare_anchors();\n",
        "",
        errors("different_weights"),
    ),
    Mutation(
        "a caught error stays with a node",
        "src/engine/step/core_state.cpp",
        "if (outer) outer->went_on();",
        "",
        errors("is_caught"),
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
        "all nodes draw the first node's random numbers after a load",
        "python/penstock/front/checkpoint.py",
        "if self._rank != self._place or not self._engine._ranks.on_first_node():",
        "if self._rank != self._place:",
        outer("generators"),
    ),
    Mutation(
        "a save between outer steps saves one node's weights",
        "src/engine/model/checkpoints.cpp",
        "const int64_t left = state.outer ? state.outer->steps_left() : 0; left > 0",
        "const int64_t left = 0; left > 0",
        outer("between_outer_steps"),
    ),
    Mutation(
        "a node that failed lets others wait for the timeout",
        "src/engine/step/core_state.cpp",
        "if (outer) outer->failed(left, driver->owes());",
        "",
        errors("dies"),
    ),
]
