"""Bugs to plant, one at a time: each must make a test fail (run.py)."""

from __future__ import annotations

from border import AT_THE_BORDER
from device import BESIDE_A_DEVICE
from experts import OVER_EXPERT_RANKS
from forks import IN_FORKS
from inference import INFERENCE
from memory import OF_ACTIVATIONS
from monitor import OF_A_RUN
from outer import OVER_NODES
from pipeline import OVER_STAGES
from planted import Mutation, Program, Pytest, draw, gtest, ranks
from saves import OF_CHECKPOINTS
from tensor import OVER_TENSOR_RANKS
from wires import OVER_WIRES

CHUNKS = ranks("*Chunks*")
GRAD_DISK = ranks("*_grad_disk")
RECOMPUTED = ranks("*Recomputed*")
ALL_DISK = ranks("*world2*_all_disk")
RULES = Program("src/plan/plan_test")
PLACES = Program("src/place/place_test")
VIEWS = gtest("src/activations/activations_test", "*ActivationsTest.WhatUnitsShare*")
FORMULAS = gtest("src/optim/optim_test", "OptimizerStep.*")
BYTES = gtest("src/mem/mem_test", "DiskTest.GivesBack*:Extents.*")
TILES = Program("src/tiles/tiles_test")
EDITED = Pytest(("tests/parity/test_loops.py", "-k", "edited and zero2"))
EDITED_ON_DISK = Pytest(("tests/parity/test_loops.py", "-k", "biases and zero3"))
SCHEDULE = Pytest(("tests/python/test_api.py", "-k", "schedule_of_the_config"))
SCALE = Pytest(("tests/parity/test_known_bugs.py", "-k", "b31 and zero3"))
EDITS = Pytest(("tests/parity/test_border.py", "-k", "clamp and bf16"))
OTHER_MEMORY = Pytest(("tests/parity/test_border.py", "-k", "other_memory or old_memory"))
DROPPED = Pytest(("tests/parity/test_border_gradients.py", "-k", "are_dropped"))
LAYERS = Pytest(("tests/parity/test_root_layers.py", "-k", "stays"))
BATCH_NORM = Pytest(("tests/parity/test_activations.py", "-k", "conv_net and world1"))

CHECK, COPIES, ROUTE = "src/plan/check.cpp", "src/plan/copies.cpp", "src/plan/route.cpp"
WALK, PARAMS, VALUES = (
    "src/exec/mesh_walk.cpp",
    "src/exec/params.cpp",
    "src/exec/gathered_values.cpp",
)
BORDER = "src/engine/step/outside_edits.cpp"
GRADIENTS, UPDATES = "src/exec/gradients.cpp", "src/exec/updates.cpp"
OPTIMIZER_STEP = "src/optim/optimizer_step.cpp"

# By file, so that the build makes each of them anew only once more.
MUTATIONS = [
    # ---- src/plan
    Mutation(
        "a forbidden cell goes through: gradients where no state is",
        CHECK,
        "if (grad.tier == optim.tier && grad.layout == optim.layout) return;",
        "if (grad.tier == optim.tier) return;",
        RULES,
    ),
    Mutation(
        "a forbidden cell goes through: an update with a sum",
        CHECK,
        "if (!cell(role, phase).partial()) continue;",
        "if (!cell(role, phase).partial() || role == Role::kGrad) continue;",
        RULES,
    ),
    Mutation(
        "a forbidden cell goes through: a phase that computes elsewhere",
        CHECK,
        "if (cell(role, phase) == normalize(wanted, mesh_)) return;",
        "if (cell(role, phase).layout == normalize(wanted, mesh_).layout) return;",
        RULES,
    ),
    Mutation(
        "a forbidden cell goes through: gradients in fp16",
        CHECK,
        "if (dtype == precision_ || dtype == Dtype::kFp32) continue;",
        "if (dtype == precision_ || role == Role::kGrad) continue;",
        RULES,
    ),
    Mutation(
        "wrong source: the copy that was made first",
        COPIES,
        "    if (apply_all(place, moves)) return place;\n",
        "    if (apply_all(places_.back(), moves)) return places_.back();\n"
        "    if (apply_all(place, moves)) return place;\n",
        RULES,
    ),
    Mutation(
        "stale copy: a move leaves the working copy in the book",
        COPIES,
        "    drop();\n    if (to != places_.back())",
        "    if (to != places_.back())",
    ),
    Mutation(
        "stale copy: what a gradient moved from stays in the book",
        COPIES,
        "  std::erase(places_, Placement(from));\n",
        "",
    ),
    Mutation(
        "stale copy: a write leaves the others in the book",
        COPIES,
        "{ places_ = {place}; }",
        "{ make(place); }",
        RULES,
    ),
    Mutation(
        "stale copy: a drop leaves the working copy in the book",
        COPIES,
        "places_.erase(places_.begin(), places_.end() - 1);",
        "if (places_.size() > 2) places_.erase(places_.begin(), places_.end() - 1);",
    ),
    Mutation(
        "wrong part of a slice: the first on every rank",
        ROUTE,
        "pass.part = pass.part * mesh.size(axis) + mesh.coordinate(rank, axis);",
        "pass.part = pass.part * mesh.size(axis) + mesh.coordinate(0 * rank, axis);",
    ),
    Mutation(
        "wrong part of a slice: axes the wrong way round",
        ROUTE,
        "pass.part = pass.part * mesh.size(axis) + mesh.coordinate(rank, axis);",
        "pass.part += pass.parts / mesh.size(axis) * mesh.coordinate(rank, axis);",
    ),
    Mutation(
        "widened sum: not widened",
        ROUTE,
        "if (more && passes[i].sums()) passes[i].to.dtype = Dtype::kFp32;",
        "if (more && passes[i].sums()) passes[i].to.dtype = wanted.dtype;",
        RULES,
    ),
    Mutation(
        "widened sum: rounded to what it came in",
        ROUTE,
        "return dtype == from.dtype ? first : Dtype::kFp32;",
        "return first;",
        RULES,
    ),
    Mutation(
        "skipped cast: no publish where only the dtype differs",
        "src/plan/table.cpp",
        "if (moves.empty() && has_master(rest.dtype)) {",
        "if (false) {",
        draw(112),
    ),
    # ---- src/mem
    Mutation(
        "stripes over each other",
        "src/mem/disk_tier.cpp",
        "index / num_files * stripe + at % stripe,",
        "index / num_files * stripe,",
        BYTES,
    ),
    Mutation(
        "activations on disk over each other",
        "src/mem/extents.cpp",
        "free_.erase(first);",
        "",
        BYTES,
    ),
    # ---- src/exec
    Mutation(
        "skipped cast: a pass copies the bytes",
        WALK,
        "    device::recode(stops_[t][index], after, from,",
        "    if (before != after && !adds_here(travel, index)) {\n"
        "      device::copy(stops_[t][index], from, numel * dtype_bytes(after));\n"
        "      continue;\n"
        "    }\n"
        "    device::recode(stops_[t][index], after, from,",
    ),
    Mutation(
        "widened sum: read in the dtype that it ends in",
        WALK,
        "return pass == 0 ? travel.first : dtype_after(travel, pass - 1);",
        "return pass == 0 ? travel.first : travel.last;",
    ),
    Mutation(
        "drop a micro-batch: a sum that ends in place overwrites",
        WALK,
        "numel_at(travel, route_.to), travel.adds);",
        "numel_at(travel, route_.to), false);",
    ),
    Mutation(
        "swapped shards: the collective's",
        WALK,
        "const Address own = stops_[t][index] + members_[index]->index * bytes;",
        "const int other = members_[index]->size() - 1 - members_[index]->index;\n"
        "    const Address own = stops_[t][index] + other * bytes;",
    ),
    Mutation(
        "reduce twice",
        WALK,
        "    channel.reduce_scatter(label, *members_[index], reduces_[index], staging_of(index));",
        "    channel.reduce_scatter(label, *members_[index], reduces_[index], staging_of(index));\n"
        "    for (comm::ReduceBuffer& buffer : reduces_[index]) buffer.accumulate = true;\n"
        "    channel.reduce_scatter(label, *members_[index], reduces_[index], staging_of(index));",
    ),
    Mutation(
        "squares of a part that this rank does not count",
        WALK,
        "if (replicated != (summed && last.kind == PassKind::kAllReduce)) return false;",
        "(void)replicated, (void)summed;",
    ),
    Mutation(
        "packed pieces are unpacked from one's own",
        "src/comm/channel.cpp",
        "Address from = staging + i * packed;",
        "Address from = staging + members.index * packed;",
    ),
    Mutation(
        "wrong divisor: all ranks, where only some are summed",
        WALK,
        "1.0F / static_cast<float>(members.size());",
        "1.0F / static_cast<float>(mesh_.data());",
    ),
    Mutation(
        "wrong divisor: a sum does not divide",
        WALK,
        "1.0F / static_cast<float>(members.size());",
        "1.0F;",
    ),
    Mutation(
        "wrong source: a gather from the resting copy",
        PARAMS,
        "const Buffer& source = find(flat.params, from)->one();\n        std::vector<Copy> made;",
        "const Buffer& source = flat.rest().one();\n        std::vector<Copy> made;",
    ),
    Mutation(
        "stale copy: what was gathered once is used for ever",
        PARAMS,
        "if (unit.params.at_rest()) return;",
        "if (unit.params.at_rest() || unit.attached) return;",
    ),
    Mutation(
        "drop a micro-batch: the last overwrites the sum",
        GRADIENTS,
        "const bool adds = sum != nullptr;",
        "const bool adds = false;",
    ),
    Mutation(
        "drop a micro-batch: the last overwrites the partial sum",
        GRADIENTS,
        "slot.numel, slot.written);",
        "slot.numel, false);",
    ),
    Mutation(
        "wrong source: a gradient from where the backward left it",
        GRADIENTS,
        "return made != held && apply_all(made, moves) == held ? made : held;",
        "return apply_all(made, moves) ? made : held;",
    ),
    Mutation(
        "stale copy: what a gradient moved from stays valid",
        GRADIENTS,
        "      source->valid = false;\n",
        "",
    ),
    Mutation(
        "stale copy: a gradient on disk outlives its update",
        GRADIENTS,
        "    copy.valid = false;\n",
        "",
        GRAD_DISK,
    ),
    Mutation(
        "the norm counts every replica",
        GRADIENTS,
        "numel /= mesh.size(axis);",
        "",
    ),
    Mutation(
        "the norm leaves out gradients on disk",
        GRADIENTS,
        "flat.squares = own_squares(flat, &copy, nullptr);",
        "flat.squares = 0.0;",
        GRAD_DISK,
    ),
    Mutation(
        "sums of gradients are not written back",
        GRADIENTS,
        "rank_.traffic.put_back(copy.one());",
        "copy.one().memory.reset();",
        GRAD_DISK,
    ),
    Mutation(
        "missing unit in the norm",
        "src/exec/norm.cpp",
        "own.squares += gradients_.own_squares(",
        "if (&unit != &rank_.units.back()) own.squares += gradients_.own_squares(",
    ),
    Mutation(
        "clip factor ignored",
        "src/exec/gradient_clipping.h",
        "if (clip > 0.0) return",
        "if (clip < 0.0) return",
    ),
    Mutation(
        "a fused publish is written for its first unit alone",
        "src/exec/executor.cpp",
        "std::count(step.units.begin(), step.units.end(), unit) > 0;",
        "step.units.front() == unit;",
        draw(118),
    ),
    Mutation(
        "squares of a gradient on disk are forgotten by an edit outside of this rank's shard",
        GRADIENTS,
        "slot.bad = false;\n  Copy* copy = held(flat);",
        "slot.bad = false;\n  flat.squares = Flat::kUncounted;\n  Copy* copy = held(flat);",
        EDITED_ON_DISK,
    ),
    Mutation(
        "the norm of gradients that were replaced",
        GRADIENTS,
        "if (from >= to) return;\n  flat.uncount();",
        "if (from >= to) return;",
        EDITED,
    ),
    Mutation(
        "swapped shards: the optimizer's",
        UPDATES,
        "begin = rank_.begin_of(place, flat);\n",
        "begin = flat.numel - rank_.numel_of(place, flat) - rank_.begin_of(place, flat);\n",
    ),
    Mutation(
        "unused parameters are updated",
        UPDATES,
        "if (slot.touched && from < to)",
        "if (from < to)",
    ),
    Mutation(
        "second parameter group ignored",
        UPDATES,
        "run.group = static_cast<size_t>(slot.group);",
        "run.group = 0;",
        CHUNKS,
    ),
    Mutation(
        "skipped cast: the optimizer's pass writes fp32",
        UPDATES,
        "range.param_dtype = flat.rest().one().dtype;",
        "range.param_dtype = Dtype::kFp32;",
    ),
    Mutation(
        "skipped cast: a publish to disk copies the bytes",
        UPDATES,
        "device::take(state.param.data(), state.param.dtype, master_of(flat, state), "
        "Dtype::kFp32,\n"
        "                 state.numel, false);",
        "device::copy(state.param.data(), master_of(flat, state), state.param.bytes());",
        CHUNKS,
    ),
    Mutation(
        "a chunk updates the values of the first",
        UPDATES,
        "begin = owned(flat).first + state.begin, end",
        "begin = owned(flat).first, end",
        CHUNKS,
    ),
    Mutation(
        "a chunk takes the gradient of the first",
        UPDATES,
        "&sum == &chunk.gradient ? begin : chunk.begin + begin",
        "begin",
        CHUNKS,
    ),
    Mutation(
        "a chunk is published over the first",
        UPDATES,
        "publish_from(rest_at(flat, chunk.begin + begin), range, master)",
        "publish_from(rest_at(flat, begin), range, master)",
        CHUNKS,
    ),
    Mutation(
        "step counts advance with every chunk",
        UPDATES,
        "if (!chunk.last()) continue;",
        "if (chunk.index > 0 && !chunk.last()) continue;",
        CHUNKS,
    ),
    Mutation(
        "optimizer state is not written back",
        UPDATES,
        "for (Buffer& kept : rest.buffers) rank_.traffic.put_back(kept);",
        "for (Buffer& kept : rest.buffers) rank_.traffic.drop(kept);",
        ALL_DISK,
    ),
    Mutation(
        "parameters on disk stay as they were",
        UPDATES,
        "rank_.traffic.put_back(state.param);",
        "state.param.memory.reset();",
        ALL_DISK,
    ),
    Mutation(
        "stale copy: state that was written back is not valid again",
        UPDATES,
        "    rest.valid = true;\n",
        "",
        CHUNKS,
    ),
    Mutation(
        "a write does not reach the masters",
        VALUES,
        "if (master.exists()) into(",
        "if (!master.exists()) into(",
    ),
    Mutation(
        "wrong part of a slice: of what was written",
        VALUES,
        "values + (from - first) * size,",
        "values + 0 * size,",
    ),
    Mutation(
        "an edit in low precision does not reach the master",
        UPDATES,
        "    take_edits(flat, master, chunk.begin + begin, range.numel);\n",
        "",
        EDITS,
    ),
    Mutation(
        "other memory of a parameter does not reach its copies",
        BORDER,
        "  executor_.values().write(*flat, slot->offset, slot->numel,",
        "  executor_.values().write(*flat, slot->offset, 0,",
        OTHER_MEMORY,
    ),
    Mutation(
        "who shares a parameter's old memory sees its new values",
        BORDER,
        "  if (shares_storage(param.tensor, *slot)) {",
        "  if (shares_storage(param.tensor, *slot) && false) {",
        OTHER_MEMORY,
    ),
    Mutation(
        "an edit of gathered values is lost without a word",
        "src/engine/model/values.cpp",
        "    if (!write) refuse_edits(units);\n",
        "    if (write) refuse_edits({});\n",
        Pytest(("tests/parity/test_border.py", "-k", "would_be_lost")),
    ),
    Mutation(
        "gradients that users dropped are applied",
        BORDER,
        "  for (Param* param : dropped) forget(*param);\n",
        "",
        DROPPED,
    ),
    Mutation(
        "a second backward is added in low precision",
        GRADIENTS,
        "        widen(*sum);\n",
        "",
        Pytest(("tests/parity/test_border_gradients.py", "-k", "low_precision")),
    ),
    Mutation(
        "moment not carried over: SGD",
        OPTIMIZER_STEP,
        "call.grad_scale, call.run.step == 1});",
        "call.grad_scale, true});",
        FORMULAS,
    ),
    Mutation(
        "moment not carried over: Adam",
        OPTIMIZER_STEP,
        "  optim::adam(call.run.range, call.run.moment1",
        "  float* mean = static_cast<float*>(call.run.moment1);\n"
        "  for (int64_t i = 0; i < call.run.range.numel; ++i) mean[i] = 0.0F;\n"
        "  optim::adam(call.run.range, call.run.moment1",
        FORMULAS,
    ),
    Mutation(
        "late gradient lost",
        "src/engine/step/driver.cpp",
        "executor_.gradients().run(planned, true);",
        "for (const int unit : units) {\n"
        "        for (exec::Flat& flat : executor_.units()[unit].flats) {\n"
        "          const auto is_late = [&](const exec::Copy& copy) {\n"
        "            return copy.place == executor_.table().grad_after_backward();\n"
        "          };\n"
        "          if (late[unit]) std::erase_if(flat.grads, is_late);\n"
        "        }\n"
        "      }",
        RECOMPUTED,
    ),
    Mutation(
        "a saved view from the beginning of its storage",
        "src/activations/activations.cpp",
        "whole.as_strided(as.sizes, as.strides, whole.storage_offset() + after);",
        "whole.as_strided(as.sizes, as.strides, whole.storage_offset() + 0 * after);",
        VIEWS,
    ),
    # ---- src/tiles, src/engine
    Mutation(
        "targets of another tile",
        "src/tiles/tiled_operators.cpp",
        "chunk.of(of.target).sub(one.first[tile]);",
        "chunk.of(of.target).sub(one.first[0]);",
        TILES,
    ),
    Mutation(
        "cast of a buffer",
        "src/engine/model/adoption.cpp",
        "at::Tensor buffer = own.cpu().contiguous();",
        "own.set_data(own.to(at::kBFloat16));\n    at::Tensor buffer = own.cpu().contiguous();",
        CHUNKS,
    ),
    Mutation(
        "wrong divisor: an incomplete window",
        "src/engine/step/accumulation_window.cpp",
        "return std::min(seen(), accumulate_);",
        "return accumulate_;",
    ),
    Mutation(
        "wrong divisor: the loss scale stays in the gradient",
        "src/engine/step/core_state.cpp",
        "return averaged * loss_scale.value();",
        "return averaged;",
        SCALE,
    ),
    Mutation(
        "a frozen table that the head reads goes with the next backward",
        "src/engine/step/core_state.cpp",
        "(!own.expected || only_use) && unit != 0 && !spans",
        "(!own.expected || only_use) && unit != 0",
        LAYERS,
    ),
    Mutation(
        "a layer that comes back is whole for its first use only",
        "src/engine/step/core_state.cpp",
        "if (spans && !order->done()) return driver->pin(unit);",
        "",
        LAYERS,
    ),
    Mutation(
        "a shard is sent by the last rank that holds it",
        "src/place/groups.cpp",
        "for (auto holder = holders.rbegin(); holder != holders.rend(); ++holder) {",
        "for (auto holder = holders.begin(); holder != holders.end(); ++holder) {",
        PLACES,
    ),
    Mutation(
        "views of what was sharded dangle after the end",
        "src/engine/model/restore_model.cpp",
        "!exact) {\n    flat.say_gone();\n    return flat.detach();\n",
        "!exact) {\n    return;\n",
        ranks("*Views*"),
    ),
    Mutation(
        "an optimizer's shards dangle after the end",
        "src/engine/model/restore_model.cpp",
        "  lent.take_back();\n",
        "",
        ranks("*Shards.*"),
    ),
    Mutation(
        "close() gathers on connections that have failed",
        "src/engine/model/restore_model.cpp",
        "      state.group->renew();\n",
        "",
        ranks("*Failures*"),
    ),
    # ---- python
    Mutation(
        "the schedule is a step late",
        "python/penstock/front/engine.py",
        "self._core.steps + 1)",
        "max(1, self._core.steps))",
        SCHEDULE,
    ),
    Mutation(
        "running again changes buffers again",
        "python/penstock/front/recompute.py",
        "with buffers.as_before(), objects.as_before(), fields",
        "with objects.as_before(), fields",
        BATCH_NORM,
    ),
]
MUTATIONS += AT_THE_BORDER + OF_CHECKPOINTS + BESIDE_A_DEVICE + OVER_TENSOR_RANKS + OVER_STAGES
MUTATIONS += OF_A_RUN + OVER_WIRES + OVER_NODES + IN_FORKS + OF_ACTIVATIONS + OVER_EXPERT_RANKS
MUTATIONS += INFERENCE
