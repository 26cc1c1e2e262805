"""What stages of a pipeline owe each other, left out or done twice."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest

GRADIENTS, VALUES, WHOLES = "src/exec/gradients.cpp", "src/exec/values.cpp", "src/engine/wholes.cpp"
STAGES, LANES = "src/engine/stages.cpp", "src/engine/stage_lanes.cpp"
FRONT, WINDOW = "python/penstock/pipeline_parallel.py", "python/penstock/stages.py"

TRAINS = Pytest(("tests/parity/test_pipeline.py", "-k", "two_stages and zero2"))
MESHES = Pytest(("tests/parity/test_pipeline.py", "-k", "test_trains and zero1"))


def life(story: str) -> Pytest:
    return Pytest(("tests/parity/test_pipeline_life.py", "-k", story))


OVER_STAGES = [
    Mutation(
        "gradients of tied weights are not added up",
        "src/plan/planner.cpp",
        "          sum_stages(unit);\n",
        "",
        TRAINS,
    ),
    Mutation(
        "the norm counts tied weights once a stage",
        GRADIENTS,
        "  if (!rank_.is_first_owner(flat)) return 0.0;  // of tied weights, one stage\n",
        "",
        TRAINS,
    ),
    Mutation(
        "weights of another stage are this rank's",
        VALUES,
        "  return own.defined() ? own : values;\n",
        "  return own.defined() ? own : zeros32(flat.numel);\n",
        TRAINS,
    ),
    Mutation(
        "what another stage's parameters are written to stays there",
        WHOLES,
        "    if (!stages && one.flat->tensor != TensorCut::kCut) continue;\n",
        "    if (one.flat->tensor != TensorCut::kCut) continue;\n",
        life("looks_at_weights"),
    ),
    Mutation(
        "edits of another stage's parameters are lost in silence",
        WHOLES,
        "      if (hash_of(slot.param.detach()) != shown_[&slot].hash) name = slot.name;\n",
        "",
        life("edits_of_another_stage"),
    ),
    Mutation(
        "every stage saves tied weights",
        "src/ckpt/inventory.cpp",
        "  if (!stages.empty() && stages.front() != stage) return {0, 0};  // that one's\n",
        "",
        life("checkpoints"),
    ),
    Mutation(
        "a stage begins with an embedding",
        STAGES,
        '    may_begin.push_back(tree.modules[module].type != "Embedding");\n',
        "    may_begin.push_back(true);\n",
        life("t5"),
    ),
    Mutation(
        "what encloses pieces is on one stage",
        STAGES,
        "    if (all) stages.of_param.back() = every;\n",
        "    if (all) stages.of_param.back() = {0};\n",
        gtest("src/engine/engine_test", "Stages*"),
    ),
    Mutation(
        "gradients are not handed back",
        WINDOW,
        "        if action.stage > 0:\n            grads",
        "        if action.stage > 1:\n            grads",
        Pytest(("tests/parity/test_pipeline.py", "-k", "two_stages and zero2", "-x")),
    ),
    Mutation(
        "the loss counts on every stage",
        "python/penstock/batches.py",
        "self._core.mean(own, bool(losses))",
        "self._core.mean(own)",
        TRAINS,
    ),
    Mutation(
        "what was received is not what the stage begins with",
        FRONT,
        "            one.resolve(leaf.view_as(leaf) if wanted else leaf)",
        "            one.resolve(torch.zeros_like(leaf))",
        TRAINS,
    ),
    Mutation(
        "all stages of a rank count as micro-batches",
        "src/engine/state.cpp",
        "static_cast<double>(averaged) / config.parallel.virtual_stages",
        "static_cast<double>(averaged)",
        MESHES,
    ),
    Mutation(
        "messages are expected in this rank's order",
        LANES,
        "  for (const Action& made : schedule.ranks[static_cast<size_t>((index + 1) % size)]) {\n",
        "  for (const Action& made : schedule.ranks[static_cast<size_t>(index)]) {\n",
        MESHES,
    ),
]
