"""What lossy wires round that must stay exact, and roundings that are not those of the table."""

from __future__ import annotations

from planted import Mutation, Program, Pytest, gtest

PASS, WALK = "src/exec/encoded_pass.cpp", "src/exec/mesh_walk.cpp"
PARAMS, VALUES = "src/exec/params.cpp", "src/exec/gathered_values.cpp"
CODEC = gtest("src/device/device_test", "*WireCodec*")
RULES = Program("src/plan/plan_test")


def wires(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_wires.py", "-k", tests))


def residuals(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_residuals.py", "-k", tests))


def deltas(tests: str) -> Pytest:
    return Pytest(("tests/parity/test_deltas.py", "-k", tests))


TRAINING = wires("trains_like and zero3-fp32")
ARRIVE = wires("arrive and zero3-int8-fp32")
SUMS = wires("at_most_a_step and ddp-int8")
EXACT = wires("edits_are_exact and zero3")
EXACT_STEPS = wires("exact_steps_are_those and late")
PLANNING = "src/engine/step/planning.cpp"
RESIDUALS = "src/exec/residuals.cpp"
LOST = residuals("nothing_is_lost and 26")

OVER_WIRES = [
    Mutation(
        "stochastic rounding rounds to nearest",
        "src/device/wire_codec.cpp",
        "hn::ConvertTo(di, hn::Floor(hn::Add(scaled, noise)))",
        "hn::NearestInt(scaled)",
        CODEC,
    ),
    Mutation(
        "values below the smallest normal float8 are encoded as normal ones",
        "src/device/wire_codec.cpp",
        "hn::Min(hn::IfThenElse(is_small, small, large)",
        "hn::Min(hn::IfThenElse(is_small, hn::Max(small, hn::Set(di, 8)), large)",
        CODEC,
    ),
    Mutation(
        "an infinite value is encoded as a number",
        "src/device/wire_blocks.h",
        "if (largest_bits >= kInfBits) return {",
        "if (largest_bits > kInfBits) return {",
        CODEC,
    ),
    Mutation(
        "gradients may be rounded to nearest",
        "src/plan/check.cpp",
        "if (rounds(table_.wires.grad, Rounding::kNearest) && !table_.keeps_residual()) {",
        "if (false) {",
        wires("refused and biased"),
    ),
    Mutation(
        "a rank keeps its own shard as it was",
        PASS,
        "      device::decode_sum({.dst = shard(part, part.full, member),",
        "      if (member != members_.index)\n"
        "      device::decode_sum({.dst = shard(part, part.full, member),",
        ARRIVE,
    ),
    Mutation(
        "the squares are those of the sum before it travelled on",
        PASS,
        "  if (everywhere_) {\n",
        "  for (const Encoding& part : parts_) {\n"
        "    if (part.sum.squares == nullptr) continue;\n"
        "    *part.sum.squares = device::host::sum_squares(part.sum.result.host(),\n"
        "                                                  part.sum.result_dtype, part.numel);\n"
        "  }\n"
        "  for (Encoding& part : parts_) part.sum.squares = nullptr;\n"
        "  if (everywhere_) {\n",
        SUMS,
    ),
    Mutation(
        "ranks that hold a gradient alike round it by numbers of their own",
        PASS,
        "static_cast<uint64_t>(members_.index)};",
        "static_cast<uint64_t>(members_.ranks.front() + 7 * members_.index)};",
        wires("trains_like and tensor2 and ddp"),
    ),
    Mutation(
        "all members round by the same numbers",
        PASS,
        "static_cast<uint64_t>(members_.index)};",
        "0};",
        wires("noise_differs"),
    ),
    Mutation(
        "gathered() has the rounded values",
        PARAMS,
        "  if (coded(index)) drop(index);\n  move_to(index, Phase::kForward, {});",
        "  move_to(index, Phase::kForward);",
        EXACT,
    ),
    Mutation(
        "rounded values are taken for edits",
        PARAMS,
        "if (move.wire.lossy()) unit.codings.push_back(move.wire);",
        "if (move.axes.empty()) unit.codings.push_back(move.wire);",
        TRAINING,
    ),
    Mutation(
        "the scale of a sum is forgotten",
        PASS,
        "part.numel, to.scale,",
        "part.numel, 1.0F,",
        SUMS,
    ),
    Mutation(
        "an exchange between nodes is encoded inside them as well",
        "src/place/wire.cpp",
        "if (mesh.size(Axis::kLocal) == 1) seen.on(Axis::kLocal) = on(Axis::kNode);",
        "seen.on(Axis::kLocal) = on(Axis::kNode);",
        gtest("src/place/place_test", "WireTest.*"),
    ),
    Mutation(
        "exact steps keep the wires of the table",
        PLANNING,
        "is_exact_step(config.comm, step) ? TableWires() : table.wires",
        "is_exact_step(config.comm, step) ? table.wires : table.wires",
        EXACT_STEPS,
    ),
    Mutation(
        "parameters that move off the plan have lossy wires in exact steps",
        PLANNING,
        "  executor.params().use(table.wires.param);\n",
        "  executor.params().use(executor.table().wires.param);\n",
        wires("exact_steps_are_those and twice"),
    ),
    Mutation(
        "an exact step begins with parameters that were published by deltas",
        PLANNING,
        "is_exact_step(config.comm, step + 1) ?",
        "is_exact_step(config.comm, step) ?",
        deltas("exact_steps_begin and zero1"),
    ),
    Mutation(
        "a delta replaces the parameters at rest",
        PASS,
        ".accumulate = wire_.delta}",
        ".accumulate = false}",
        deltas("arrive_as_coded and zero1-fp32"),
    ),
    Mutation(
        "a delta is computed from zeros",
        PASS,
        "    const Address held = shard(part, part.full, members_.index);\n",
        "    const Address held{};\n",
        deltas("arrive_as_coded and zero1-fp32"),
    ),
    Mutation(
        "the base keeps the first parameters",
        "src/exec/delta_base.cpp",
        "  if (!rank.cells.base || !flat.trainable) return;\n",
        "  if (!rank.cells.base || !flat.trainable || flat.base.memory) return;\n",
        deltas("edit_changes_what and zero1-in_place-bf16-state"),
    ),
    Mutation(
        "an edit of a parameter without a gradient is not published",
        "src/exec/updates.cpp",
        "  if (rank_.cells.base && numel > 0 && !update_.external) {",
        "  if (rank_.cells.base && used && numel > 0 && !update_.external) {",
        deltas("edit_without_a_gradient and zero1"),
    ),
    Mutation(
        "the state of a parameter lacks its edits",
        "src/engine/model/param_state.cpp",
        "      if (has) state.executor->values().take_edits(static_cast<int>(unit));\n",
        "      if (has && unit > units.size()) state.executor->values().take_edits(0);\n",
        deltas("edit_changes_what and zero1-in_place-bf16-state"),
    ),
    Mutation(
        "a checkpoint lacks edits of parameters",
        "src/engine/model/checkpoints.cpp",
        "exec::take_every_edit(*state.executor);\n",
        "{}\n",
        deltas("edit_changes_what and zero1-in_place-bf16-save"),
    ),
    Mutation(
        "an edit drops what was not published yet",
        "src/device/host_edits.cpp",
        "std::isfinite(unsent) ? value + unsent : value",
        "std::isfinite(unsent) ? value : value",
        deltas("edit_changes_what and zero1-in_place-bf16-save"),
    ),
    Mutation(
        "loaded values that rest already are not those of the masters",
        "src/engine/model/values.cpp",
        "  if (write && executor.table().keeps_base() && !state_->driver->section()) {",
        "  if (write && executor.table().keeps_base() && state_->driver->section()) {",
        deltas("loaded_values and fp32-True"),
    ),
    Mutation(
        "the update publishes into the base of its own delta",
        "src/plan/route.cpp",
        "  if (passes[pass + 1].wire.delta) return false;\n",
        "",
        deltas("arrive_as_coded and zero1-bf16"),
    ),
    Mutation(
        "a run that goes on counts exact steps from its start",
        "src/engine/model/checkpoints.cpp",
        "  Planning{state}.follow_wires();\n",
        "",
        EXACT_STEPS,
    ),
    Mutation(
        "a step that is dropped changes the residual",
        "src/exec/gradients.cpp",
        "  Residuals::drop(flat);\n",
        "",
        residuals("dropped_window and zero1"),
    ),
    Mutation(
        "what a sign leaves in a parameter without a gradient is kept",
        RESIDUALS,
        "        if (!slot.touched) restore(flat, slot);\n",
        "        if (slot.numel < 0) restore(flat, slot);\n",
        residuals("nothing_is_lost and 152"),
    ),
    Mutation(
        "an exact sum over all ranks adds a node's residual as one rank's",
        RESIDUALS,
        "      fed.factor *= static_cast<float>(rank_.meshes.of(flat).mesh.size(axis));\n",
        "      fed.factor *= static_cast<float>(rank_.meshes.of(flat).mesh.size(axis) > 0);\n",
        LOST,
    ),
    Mutation(
        "a loaded residual counts once, not for each rank",
        RESIDUALS,
        "      addends *= rank_.meshes.of(flat).mesh.size(axis);\n",
        "      addends *= rank_.meshes.of(flat).mesh.size(axis) > 0;\n",
        residuals("checkpoint_keeps"),
    ),
    Mutation(
        "second moments are made of signs",
        "src/exec/updates.cpp",
        "  return update.rules.keeps_second_moments && slot.squared > 0;\n",
        "  return update.rules.keeps_second_moments && slot.squared > 99;\n",
        residuals("leave_second_moments"),
    ),
    Mutation(
        "a checkpoint counts the updates of second moments as those of weights",
        "src/engine/model/checkpoints.cpp",
        "        if (slot.squared != slot.updates) squared[name] = slot.squared;\n",
        "        if (slot.squared > slot.updates) squared[name] = slot.squared;\n",
        residuals("leave_second_moments"),
    ),
]
