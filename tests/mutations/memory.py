"""Mistakes in the memory of activations."""

from __future__ import annotations

from planted import Mutation, Pytest

MEMORY = "src/engine/step/activation_memory.cpp"


def activations(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_activation_memory.py", "-k", tests))


KEPT = activations("forward_keeps and zero3")

OF_ACTIVATIONS = [
    Mutation(
        "a second engine's tensors are taken for the first one's",
        MEMORY,
        "if (memory_->alone())",
        "if (true)",
        activations("other_engines"),
    ),
    Mutation(
        "activations are known after the first step",
        MEMORY,
        "++steps_ < 2",
        "++steps_ < 1",
        activations("forward_keeps and 1-zero3"),
    ),
    Mutation(
        "an event's stretch begins with the window",
        MEMORY,
        "  last_ = now;\n",
        "",
        KEPT,
    ),
    Mutation(
        "peaks between two events are not seen",
        MEMORY,
        "sum.stretch.change + peak - last_)",
        "sum.stretch.change + now - last_)",
        activations("recomputation"),
    ),
    Mutation(
        "the simulator keeps nothing after a unit's forward",
        "src/plan/cost/memory_meter.h",
        "tensors_now_ + stretch.change",
        "tensors_now_",
        KEPT,
    ),
    Mutation(
        "tensors freed after they were counted count forever",
        "src/device/tensor_memory.cpp",
        "  bytes_now.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));\n",
        "",
        KEPT,
    ),
    Mutation(
        "the end of a backward belongs to no event",
        "src/engine/step/driver.cpp",
        "  if (is_backward(section_)) memory_.event(Op::kBackward, 0, true);\n",
        "",
        activations("end_of_a_backward"),
    ),
    Mutation(
        "a second forward forgets the first",
        MEMORY,
        "forward && after_forward_ && !in_stages_",
        "false",
        activations("two_forwards"),
    ),
    Mutation(
        "an evaluation in a window begins a new one",
        "src/engine/step/driver.cpp",
        "section == Section::kForward && !lost_hold_",
        "section == Section::kForward",
        activations("evaluations"),
    ),
]
