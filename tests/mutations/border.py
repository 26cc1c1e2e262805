"""Bugs at the border with users' code: what ranks agree on, and what they look at."""

from __future__ import annotations

from planted import Mutation, Pytest

RANKS = "tests/parity/test_border_ranks.py"
WINDOWS = "tests/parity/test_border_windows.py"
MICRO_STEPS = Pytest((WINDOWS, "-k", "micro_steps and zero2"))
LATE = Pytest((WINDOWS, "-k", "late_on_one_rank and zero2-1-False"))
AGREEMENT = "src/engine/step/window_agreement.cpp"

AT_THE_BORDER = [
    Mutation(
        "a backward that gave nothing on this rank is none of the window",
        AGREEMENT,
        "anywhere[i] = std::max(anywhere[i], all[rank][i]);",
        "anywhere[i] = std::min(anywhere[i], all[rank][i]);",
        MICRO_STEPS,
    ),
    Mutation(
        "a backward that gave nothing anywhere closes a window",
        AGREEMENT,
        "const bool shorter = window.keep(anywhere.substr(0, backwards));",
        "const bool shorter = false;",
        MICRO_STEPS,
    ),
    Mutation(
        "late gradients are moved by the rank alone that has them",
        AGREEMENT,
        "late.push_back(anywhere[i] == '1');",
        "late.push_back(driver.late()[i - backwards]);",
        LATE,
    ),
    Mutation(
        "options may differ by rank",
        AGREEMENT,
        "if (all[rank].substr(options) != all.front().substr(options)) {",
        "if (all.empty()) {",
        Pytest((RANKS, "-k", "another_lr and zero2")),
    ),
    Mutation(
        "edits that torch does not count are lost",
        "src/engine/step/outside_edits.cpp",
        "  return executor_.values().edited(index);",
        '  return "";',
        Pytest((RANKS, "-k", "edited_on_the_way and zero3-hook")),
    ),
    Mutation(
        "an optimizer of one's own loses the attributes of parameters",
        "python/penstock/front/optimizer.py",
        "            vars(master).update(vars(param))",
        "            vars(master).update({})",
        Pytest((RANKS, "-k", "reads_attributes and zero2")),
    ),
    Mutation(
        "a cache that grew is there twice when a unit runs again",
        "python/penstock/front/recompute.py",
        "with buffers.as_before(), objects.as_before():\n                return inner(",
        "with buffers.as_before():\n                return inner(",
        Pytest(("tests/parity/test_objects.py", "-k", "an_object_that_blocks_change")),
    ),
]
