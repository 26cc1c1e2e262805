"""Bugs to plant, one at a time: each must make a test fail (run.py)."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    name: str
    file: str
    old: str  # must be there once
    new: str
    tests: tuple[str, ...] = ()  # pytest's arguments; empty = run.py's


TILES = ("tests/parity/test_tiling.py",)
ACTIVATIONS = ("tests/parity/test_activations.py", "-k", "gpt")
GRADIENTS = "src/exec/gradients.cpp"
UPDATE = "src/exec/update.cpp"

MUTATIONS = [
    Mutation(
        "drop a micro-batch: the last overwrites the shard",
        GRADIENTS,
        "buffer.accumulate = last && job.accumulate;",
        "buffer.accumulate = false;",
    ),
    Mutation(
        "drop a micro-batch: the last overwrites the partial sum",
        GRADIENTS,
        "from, slot.numel, slot.written);",
        "from, slot.numel, false);",
    ),
    Mutation(
        "reduce twice",
        GRADIENTS,
        "reduce_channel_.reduce_scatter(job.label, group, {buffer});",
        "reduce_channel_.reduce_scatter(job.label, group, {buffer});\n"
        "      buffer.accumulate = last;\n"
        "      if (last) reduce_channel_.reduce_scatter(job.label, group, {buffer});",
    ),
    Mutation(
        "wrong divisor: ranks",
        GRADIENTS,
        "float scale = 1.0F / static_cast<float>(mesh_.data());",
        "float scale = 1.0F / static_cast<float>(mesh_.size(Axis::kLocal) + 1);",
    ),
    Mutation(
        "wrong divisor: an incomplete window",
        "src/engine/state.cpp",
        "std::min(seen, config.batch.accumulate)",
        "config.batch.accumulate",
    ),
    Mutation(
        "stale gather: what was gathered once is used for ever",
        "src/exec/executor.cpp",
        "if (!unit.gathered) return;",
        "if (!unit.gathered || unit.attached) return;",
    ),
    Mutation(
        "missing unit in the norm",
        UPDATE,
        "const bool stored = flat.summed &&",
        "if (&unit == &units_.back()) continue;\n      const bool stored = flat.summed &&",
    ),
    Mutation(
        "swapped shards",
        UPDATE,
        "begin = shard_index(place, mesh_, group_.rank()) * numel;",
        "begin = flat.numel - numel - shard_index(place, mesh_, group_.rank()) * numel;",
    ),
    Mutation(
        "swapped shards: the collective's",
        "src/exec/executor.cpp",
        "group.index * buffers[i].shard_bytes,",
        "(group.size() - 1 - group.index) * buffers[i].shard_bytes,",
    ),
    Mutation(
        "cast of a buffer",
        "src/engine/setup.cpp",
        "at::Tensor buffer = tree.buffers[i].contiguous();",
        "tree.buffers[i].set_data(tree.buffers[i].to(at::kBFloat16));\n"
        "    at::Tensor buffer = tree.buffers[i].contiguous();",
    ),
    Mutation(
        "clip factor ignored",
        UPDATE,
        "if (update_.clip > 0.0) scale *=",
        "if (update_.clip < 0.0) scale *=",
    ),
    Mutation(
        "late gradient lost",
        "src/exec/driver.cpp",
        "if (std::any_of(step.units.begin(), step.units.end(), late)) executor_.run(planned);",
        "for (const int unit : step.units) {\n"
        "      for (Flat& flat : executor_.units()[unit].flats) {\n"
        "        if (late(unit) && flat.partial) flat.complete_partial();\n"
        "        flat.partial.reset();\n"
        "      }\n"
        "    }",
    ),
    Mutation(
        "moment not carried over: SGD",
        UPDATE,
        "grad_scale_, slot.updates == 0});",
        "grad_scale_, true});",
    ),
    Mutation(
        "moment not carried over: Adam",
        UPDATE,
        "optim::adam(range, first, state",
        "std::memset(first, 0, range.numel * 4);\n    optim::adam(range, first, state",
    ),
    Mutation(
        "unused parameters are updated",
        UPDATE,
        "if (slot.touched && from < to)",
        "if (from < to)",
    ),
    Mutation(
        "second parameter group ignored",
        UPDATE,
        "update_.groups.at(slot.group)",
        "update_.groups.at(0)",
    ),
    Mutation(
        "a chunk updates the values of the first",
        UPDATE,
        "begin = owned(flat).first + state.begin, end",
        "begin = owned(flat).first, end",
    ),
    Mutation(
        "a chunk takes the gradient of the first",
        UPDATE,
        "flat.reduced.data() + (state.begin + begin) * size",
        "flat.reduced.data() + begin * size",
    ),
    Mutation(
        "step counts advance with every chunk",
        UPDATE,
        "if (!chunk.last()) continue;",
        "if (chunk.index > 0 && !chunk.last()) continue;",
    ),
    Mutation(
        "the norm leaves out gradients on disk",
        GRADIENTS,
        "flat.squares = own_squares(flat);",
        "flat.squares = 0.0;",
    ),
    Mutation(
        "sums of gradients are not written back",
        GRADIENTS,
        "  traffic_.put_back(flat.reduced);",
        "  flat.reduced.memory.reset();",
    ),
    Mutation(
        "optimizer state is not written back",
        "src/exec/executor.cpp",
        "if (move.to == Tier::kDisk) traffic_.put_back(*copy);",
        "if (move.to == Tier::kDisk) traffic_.let_go(*copy);",
    ),
    Mutation(
        "parameters on disk stay as they were",
        UPDATE,
        "traffic_.put_back(state.param);",
        "state.param.memory.reset();",
    ),
    Mutation(
        "stripes over each other",
        "src/mem/disk.cpp",
        "index / num_files * stripe + at % stripe,",
        "index / num_files * stripe,",
    ),
    Mutation(
        "targets of another tile",
        "src/engine/tiled_ops.cpp",
        "chunk.of(of.target).sub(one.first[tile]);",
        "chunk.of(of.target).sub(one.first[0]);",
        TILES,
    ),
    Mutation(
        "a saved view from the beginning of its storage",
        "src/exec/activations.cpp",
        "whole.as_strided(as.sizes, as.strides, whole.storage_offset() + after);",
        "whole.as_strided(as.sizes, as.strides, whole.storage_offset());",
        ("tests/parity/test_activations.py",),
    ),
    Mutation(
        "activations on disk over each other",
        "src/mem/extents.cpp",
        "free_.erase(first);",
        "",
        ACTIVATIONS,
    ),
]
