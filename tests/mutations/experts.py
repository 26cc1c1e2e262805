"""Experts that are placed, averaged or saved as if all data ranks had the same ones."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest

PLACEMENT, RANK = "src/place/model_placement.cpp", "src/exec/rank.cpp"
GRADIENTS, VALUES = "src/exec/gradients.cpp", "src/exec/gathered_values.cpp"
LIVES = Pytest(("tests/parity/test_experts.py", "-k", "test_lives and zero1 and 4-2"))
LOADS = Pytest(("tests/parity/test_experts.py", "-k", "test_loads_with_any and 3"))
PLACES = gtest("src/place/place_test", "ModelPlacementTest.*")

OVER_EXPERT_RANKS = [
    Mutation(
        "gradients of experts are averages over the ranks with the same experts",
        GRADIENTS,
        "  if (flat.placement.num_summed() > 1) {\n",
        "  if (flat.placement.num_summed() > 9) {\n",
        LIVES,
    ),
    Mutation(
        "full_grads() before step() is not the average over all data ranks",
        VALUES,
        "  if (flat.placement.num_summed() > 1) own.div_",
        "  if (flat.placement.num_summed() > 9) own.div_",
        LIVES,
    ),
    Mutation(
        "gradients of experts that a user sets are divided once more",
        GRADIENTS,
        "  if (made) factor *= flat.placement.num_summed();\n",
        "",
        Pytest(("tests/parity/test_experts.py", "-k", "sets_unused")),
    ),
    Mutation(
        "experts of different ranks count as replicas",
        PLACEMENT,
        "  const Mesh mesh = this->mesh(run);\n",
        "  const Mesh mesh = run;\n",
        PLACES,
    ),
    Mutation(
        "expert ranks are not neighbours",
        PLACEMENT,
        "  own.sizes[static_cast<size_t>(Axis::kLocal)] /= num_experts_;\n",
        "  own.sizes[static_cast<size_t>(Axis::kNode)] /= num_experts_;\n",
        PLACES,
    ),
    Mutation(
        "the first data rank keeps its own experts in place of all",
        VALUES,
        "  Members ranks = groups.of({slot.cut.axis});\n",
        "  Members ranks = rank_.groups.of({slot.cut.axis});\n",
        LIVES,
    ),
    Mutation(
        "parts of experts do not arrive at ranks that send them on",
        PLACEMENT,
        "  const Mesh own = mesh(run);\n",
        "  const Mesh& own = run;\n",
        LIVES,
    ),
    Mutation(
        "checkpoints have the shards of experts as if all data ranks had them",
        "src/ckpt/inventory.cpp",
        "    const Mesh over = flat.placement.mesh(executor.mesh());\n",
        "    const Mesh over = executor.mesh();\n",
        LOADS,
    ),
    Mutation(
        "the norm counts equal parts of experts over all data ranks",
        GRADIENTS,
        "  const Mesh& mesh = rank.meshes.of(flat).mesh;\n",
        "  const Mesh& mesh = flat.numel < 0 ? rank.meshes.of(flat).mesh : rank.mesh;\n",
        Pytest(("tests/parity/test_experts.py", "-k", "test_lives and ddp and 4-2")),
    ),
    Mutation(
        "a walk moves the experts of a unit over all data ranks",
        "src/exec/walk.cpp",
        "  OverMesh& found = part(over);\n",
        "  OverMesh& found = over.mesh.world() > 0 ? parts_.front() : part(over);\n",
        LIVES,
    ),
]
